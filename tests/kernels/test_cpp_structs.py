"""What `structs.py` and abi.h say of each other: fields, numbers, sizes."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from hf_paged_cache.formats import FORMATS
from hf_paged_cache.kernels import cpp
from hf_paged_cache.kernels.cpp import build, structs

HEADER = Path(structs.__file__).with_name("src") / "abi.h"
CODE = re.sub(r"//.*", "", HEADER.read_text(encoding="utf-8"))
STRUCTS = (structs.Strided, structs.Side, structs.Records, structs.Blocks, structs.Call, structs.Tokens)


def fields_of_header(name: str) -> list[tuple[str, str]]:
    """Names and kinds of the fields of a struct: `double`, a struct's name, or `integer` for all else."""
    body = re.search(rf"struct {name} \{{(.*?)\n\}};", CODE, re.DOTALL)
    assert body is not None, f"abi.h has no struct {name}"
    nested = {struct.__name__ for struct in STRUCTS}
    fields = []
    for declaration in body[1].split(";")[:-1]:
        kind, names = re.fullmatch(r"\s*((?:const )?\w+\*?) (.*)", declaration, re.DOTALL).groups()  # type: ignore[union-attr]
        assert kind in {"int64_t", "double", *nested} or kind.endswith("*"), f"{kind} may not have 8 bytes"
        known = kind if kind in {"double", *nested} else "integer"
        fields += [(field.strip(), known) for field in names.split(",")]
    return fields


def fields_of_python(struct: type[ctypes.Structure]) -> list[tuple[str, str]]:
    kinds = {ctypes.c_int64: "integer", ctypes.c_double: "double"} | {one: one.__name__ for one in STRUCTS}
    return [(name, kinds[kind]) for name, kind in struct._fields_]  # type: ignore[misc, index]


def numbers_of_header(enum: str) -> dict[str, int]:
    body = re.search(rf"enum {enum} : \w+ \{{(.*?)\}};", CODE, re.DOTALL)
    assert body is not None
    return {name: int(number) for name, number in re.findall(r"k(\w+) = (\d+)", body[1])}


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_both_sides_name_the_same_fields_in_one_order(struct: type[ctypes.Structure]) -> None:
    assert fields_of_python(struct) == fields_of_header(struct.__name__)


def test_every_struct_of_the_header_is_known() -> None:
    assert set(re.findall(r"struct (\w+) \{", CODE)) == {struct.__name__ for struct in STRUCTS}


def test_codecs_have_the_numbers_of_the_header() -> None:
    codecs = {
        codec for layer_format in FORMATS.values() for codec in (layer_format.keys, layer_format.values)
    }
    numbers = {type(codec).__name__: codec.kernel_id for codec in codecs}
    assert {"NoCodec": 0, **numbers} == numbers_of_header("Codec")


def test_other_numbers_are_those_of_the_header() -> None:
    statuses = {"Ok": 0, "OutOfMemory": cpp._OUT_OF_MEMORY, "BlockOutOfRange": cpp._BLOCK_OUT_OF_RANGE}
    statuses |= {"PartOfABlock": cpp._PART_OF_A_BLOCK}
    unstorable = {
        f"Unstorable{'Keys' if side == 'K' else 'Values'}": n for n, side in cpp._UNSTORABLE.items()
    }
    assert statuses | unstorable == numbers_of_header("Status")
    dtypes = {"Float32": torch.float32, "BFloat16": torch.bfloat16, "Float16": torch.float16}
    numbers = {name: structs.ELEMENT_TYPES[dtype] for name, dtype in (dtypes | {"Bool": torch.bool}).items()}
    assert numbers == numbers_of_header("ElementType")
    assert f"kMaxBlockSize = {structs.MAX_BLOCK_SIZE};" in CODE


@pytest.mark.skipif(cpp.unavailable_reason() is not None, reason=str(cpp.unavailable_reason()))
@pytest.mark.parametrize("name", ["Blocks", "Call", "Tokens"])
def test_a_library_whose_structs_have_another_size_is_not_used(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = build.load()
    cpp._declare(loaded.handle)
    longer = type(name, (getattr(structs, name),), {"_fields_": [("one_more", ctypes.c_int64)]})
    monkeypatch.setattr(structs, name, longer)
    monkeypatch.setattr(build, "load", lambda: loaded)
    monkeypatch.setattr(cpp, "_loaded", None)
    reason = str(cpp.unavailable_reason())
    sizes = (ctypes.sizeof(longer) - 8, ctypes.sizeof(longer))
    assert f"the struct {name} has {sizes[0]} bytes in abi.h and {sizes[1]} in structs.py" in reason
    assert "Install hf-paged-cache again" in reason
