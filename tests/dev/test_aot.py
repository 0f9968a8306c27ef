"""The compile gate reads binaries rightly, and passes only those without fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from dev.aot import cli
from dev.aot.binary import Binary
from dev.aot.payload import payload_lines, payload_places
from dev.aot.read import BULK_BITS, Moves, Usage, read_amd, read_amd_usage, read_sass, read_usage
from dev.aot.table import faults, render, summary
from dev.aot.targets import TARGETS
from dev.aot.variants import all_variants

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function attend_kernel:
  REG:94 STACK:{stack} SHARED:1024 LOCAL:0 CONSTANT[0]:728 TEXTURE:0 SURFACE:0 SAMPLER:0
"""

# As nvdisasm prints it: the innermost source line first, then where that was inlined.
SASS = """
	//## File "/x/triton/decoders.py", line 21 inlined at "/x/triton/attend.py", line 178
	//## File "/x/triton/attend.py", line 178
        /*0f80*/                   LDGSTS.E.BYPASS.128 [R37+0x800], desc[UR20][R30.64], P1 ;
        /*0f90*/              @!P0 LDG.E.U16 R8, desc[UR20][R30.64] ;
        /*0fa0*/              @!UP0 UIADD3 UR14, UR24, 0x1, URZ ;
	//## File "/x/triton/attend.py", line 167
        /*1f20*/               @P0 LDG.E R32, desc[UR20][R32.64] ;
        /*1f30*/                   LDGDEPBAR ;
	//## File "/x/triton/decoders.py", line 21 inlined at "/x/triton/attend.py", line 210
	//## File "/x/triton/attend.py", line 210
        /*1f40*/                   LDG.E.128.CONSTANT R4, [R2.64] ;
        /*1f50*/                   UTMALDG.4D [UR8], [UR4] ;
	//## File "/x/triton/move.py", line 69
        /*1f60*/                   STG.E.64 desc[UR4][R2.64], R4 ;
"""

AMD = """
	.loc	3 21 12                         ; decoders.py:21:12 @[ attend.py:178:16 ]
	buffer_load_dwordx4 v[20:23], v19, s[48:51], 0 offen
	buffer_load_dword v1, s[8:11], 0 offen lds
	global_load_ushort v12, v[8:9], off
	.loc	1 167 17                        ; attend.py:167:17
	s_waitcnt vmcnt(0)
	global_load_dword v107, v96, s[2:3]
	.loc	2 69 4                          ; move.py:69:4
	global_store_dwordx2 v[0:1], v[2:3], off
    .private_segment_fixed_size: {scratch}
    .sgpr_count:     93
    .sgpr_spill_count: 12
    .vgpr_count:     136
    .vgpr_spill_count: {spilled}
"""

PAYLOAD = frozenset({("decoders.py", 21), ("move.py", 69)})

FINE = Binary(
    variant="decode",
    target="sm_86",
    kernel="attend_kernel",
    warps=4,
    stages=3,
    usage=Usage(registers=114, spill_bytes=0),
    shared_bytes=70 << 10,
    piece_bits=128,
    moves=Moves(copies=Counter({128: 32})),
    programs=1,
    seconds=1.0,
)


def test_usage_counts_the_stack_as_spilled() -> None:
    assert read_usage(USAGE.format(stack=40)) == Usage(registers=94, spill_bytes=40, shared_bytes=1024)


def test_usage_of_no_kernel_or_two_is_refused() -> None:
    with pytest.raises(ValueError, match="got 0"):
        read_usage("Resource usage:")
    with pytest.raises(ValueError, match="got 2"):
        read_usage(USAGE.format(stack=0) * 2)


def test_sass_tells_keys_and_values_from_the_rest_and_their_widths() -> None:
    moves = read_sass(SASS, PAYLOAD)
    assert moves.copies == {128: 1, BULK_BITS: 1}
    assert moves.loads == {16: 1, 128: 1}
    assert moves.stores == {64: 1}
    assert moves.others == {32: 1}
    assert moves.narrowest_bits() == 16


def test_amd_assembly_tells_keys_and_values_from_the_rest_and_their_widths() -> None:
    moves = read_amd(AMD, PAYLOAD)
    assert (moves.copies, moves.loads) == ({32: 1}, {128: 1, 16: 1})
    assert (moves.stores, moves.others) == ({64: 1}, {32: 1})


@pytest.mark.parametrize(
    ("scratch", "spilled", "spill_bytes"), [(0, 0, 0), (48, 0, 48), (0, 3, 12), (16, 3, 16)]
)
def test_amd_spills_are_scratch_or_vector_registers(scratch: int, spilled: int, spill_bytes: int) -> None:
    assert read_amd_usage(AMD.format(scratch=scratch, spilled=spilled)) == Usage(136, spill_bytes)


def test_amd_assembly_without_metadata_is_refused() -> None:
    with pytest.raises(ValueError, match="vgpr_count"):
        read_amd_usage(SASS)


def test_payload_is_found_by_the_names_of_pointers() -> None:
    source = "tl.load(\n    codes_ptr + x\n)\ntl.load(scales_ptr + x)\ntl.store(pool_ptr, x)\nf(codes_ptr)\n"
    assert payload_lines(source, "a.py") == {("a.py", 1), ("a.py", 2), ("a.py", 3), ("a.py", 5)}


def test_kernels_move_keys_and_values_in_known_files_only() -> None:
    assert {name for name, _ in payload_places()} == {"decoders.py", "move.py"}


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, None),
        ({"usage": Usage(255, 8)}, "spills 8 bytes a thread"),
        ({"shared_bytes": 99 << 10}, None),
        ({"shared_bytes": (99 << 10) + 512}, "takes 99.5 KiB of shared memory, sm_86 has 99.0"),
        ({"programs": 0}, "takes more registers than a multiprocessor has"),
        (
            {"moves": Moves(copies=Counter({128: 30}), loads=Counter({16: 2}))},
            "in pieces of 16 bits, 128 are",
        ),
        ({"moves": Moves(stores=Counter({32: 1}))}, "in pieces of 32 bits, 128 are possible"),
        ({"moves": Moves(loads=Counter({16: 2})), "piece_bits": 16}, None),
        ({"moves": Moves(others=Counter({32: 9}))}, "no load of K or V was found"),
        ({"moves": Moves(), "kernel": "merge_kernel"}, None),
    ],
)
def test_faults(changed: dict[str, object], fault: str | None) -> None:
    found = faults(replace(FINE, **changed))  # type: ignore[arg-type]
    assert len(found) == (fault is not None)
    assert fault is None or fault in found[0]


@pytest.mark.parametrize(
    ("target", "registers", "shared_kib", "warps", "programs"),
    [
        ("sm_80", 128, 0, 4, 4),  # 65536 registers
        ("sm_80", 129, 0, 4, 3),  # rounded up to 136
        ("sm_86", 32, 0, 4, 12),  # 48 warps
        ("sm_86", 32, 48, 4, 2),  # 100 KiB and one taken for each program
        ("sm_90", 96, 70, 4, 3),
        ("gfx942", 128, 16, 4, 4),
        ("gfx942", 136, 20, 4, 3),
        ("gfx942", 300, 16, 4, 1),
    ],
)
def test_programs_that_fit(target: str, registers: int, shared_kib: int, warps: int, programs: int) -> None:
    fit = TARGETS[target].programs(warps=warps, registers=registers, shared_bytes=shared_kib << 10)
    assert fit == programs


def test_tensor_memory_limits_programs() -> None:
    assert TARGETS["sm_100"].programs(warps=4, registers=64, shared_bytes=0, tensor_columns=256) == 2


def test_table_marks_faults_and_the_last_line_counts_them() -> None:
    bad = replace(
        FINE, target="sm_80", usage=Usage(255, 8), moves=Moves(loads=Counter({16: 1})), piece_bits=16
    )
    lines = render([FINE, bad]).splitlines()
    assert " ".join(lines[1].split()) == "decode sm_86 4 3 114 0 70.0 async 128 1"
    assert lines[2].split() == [
        "decode",
        "sm_80",
        "4",
        "3",
        "255",
        "8",
        "70.0",
        "odd",
        "rows",
        "16",
        "1",
        "FAULT",
    ]
    assert summary([FINE, bad], 7.0) == (
        "2 binaries, at worst 255 registers, 8 bytes spilled, 70.0 KiB shared, 1 programs a multiprocessor, "
        "1 at fault, 7 s"
    )


def test_json_keeps_counts_by_width() -> None:
    plain = json.loads(json.dumps(FINE.as_json()))
    assert plain["moves"]["copies"] == {"128": 32}
    assert plain["usage"]["registers"] == 114


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (FINE, cli.OK),
        (replace(FINE, usage=Usage(255, 8)), cli.FAULTY),
        ("the compiler ended with -6: LLVM ERROR", cli.FAULTY),
    ],
)
def test_exit_code(
    result: Binary | str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "compile_isolated", lambda variant, target: result)
    monkeypatch.setattr(cli, "find_spec", lambda name: object())
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert cli.main(["--variants", "decode", "--targets", "sm_86", "--jobs", "1"]) == code
    out = capsys.readouterr().out
    assert ("FAULT: decode, sm_86: " in out) == (code == cli.FAULTY)


def test_without_triton_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert cli.main([]) == cli.CANNOT_RUN
    assert "pip install" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--targets", "sm_75"], ["--variants", "decode", "nonsense*"]])
def test_unknown_names_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == cli.CANNOT_RUN
    assert "expected names out of" in capsys.readouterr().err


def _without_interpreter(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)


CAPTURE = """
import json
from dataclasses import asdict, is_dataclass
from dev.aot.capture import KERNELS, specialise
from dev.aot.targets import TARGETS
from dev.aot.variants import all_variants
found = {}
for variant in all_variants().values():
    special = specialise(variant, TARGETS["sm_90"])
    named = special.named_constants()
    plain = {name: value for name, value in named.items() if isinstance(value, (bool, int, float, str))}
    plain |= {name: value.fn.__name__ for name, value in named.items() if hasattr(value, "fn")}
    plain |= {
        f"{name}.{key}": value if isinstance(value, (bool, int, float)) else str(value)
        for name, values in named.items() if is_dataclass(values)
        for key, value in asdict(values).items()
    }
    types = {name: kind for name, kind in special.signature.items() if kind != "constexpr"}
    found[variant.name] = {"kernel": variant.kernel, "constants": plain, "types": types}
print(json.dumps([sorted(KERNELS), found]))
"""


@pytest.mark.full
@needs_triton
def test_variants_cover_every_kernel_and_every_flag() -> None:
    done = _without_interpreter("-c", CAPTURE)
    assert done.returncode == 0, done.stderr
    from hf_paged_cache.kernels.triton import decoders, encoders

    kernels, found = json.loads(done.stdout)
    assert {row["kernel"] for row in found.values()} == set(kernels)
    assert set(found) == set(all_variants())

    attending = [row for row in found.values() if row["kernel"] == "attend_kernel"]
    rows = [row for row in attending if row["constants"]["SCORE"] == "score_plain"]

    def values(name: str) -> set[object]:
        return {row["constants"][name] for row in rows}

    for rule in ("causal", "window", "softcap", "sinks", "mask_rows"):
        assert values(f"RULES.{rule}") == {False, True}, rule
    assert values("COLUMNS") == values("SPLIT") == {False, True}
    assert values("RULES.mask") == {0, 1, 2}
    masks = {(row["constants"]["RULES.mask"], row["constants"]["RULES.mask_rows"]) for row in rows}
    assert masks >= {(1, False), (1, True)}
    assert values("M") == {16, 32, 64}
    assert values("K.dim") >= {64, 80, 96, 97, 128, 192, 256}
    assert values("GROUP") >= {1, 4, 8}
    assert values("K.block_size") == {16, 64, 1 << 30}
    assert values("K.precision") == {"ieee", "tf32x3"}
    assert any(row["constants"]["K.dim"] != row["constants"]["V.dim"] for row in rows)
    assert {row["types"]["keys_ptr"] for row in rows} == {"*bf16", "*fp16", "*fp32"}
    assert {row["types"]["k_strides"][0] for row in rows} == {"i32", "i64"}

    assert {row["constants"]["SCORE"] for row in attending} == _names(decoders, "score_")
    assert {row["constants"]["VALUES"] for row in attending} == _names(decoders, "values_")
    of_records = [row["constants"] for row in attending if row not in rows]
    assert {row["K.dim"] for row in of_records} == {64, 80, 97, 128, 256}
    assert {row["SPLIT"] for row in of_records} == {False, True}
    stores = {row["constants"].get(name) for row in found.values() for name in ("STORE_KEYS", "STORE_VALUES")}
    assert stores - {None} == _names(encoders, "store_")


def _names(module: ModuleType, prefix: str) -> set[str]:
    return {name for name in vars(module) if name.startswith(prefix)}


def test_what_costs_much_to_compile_is_left_out_for_architectures_like_others() -> None:
    rows = all_variants().values()
    assert all(row.is_for("sm_86") and row.is_for("sm_90") and row.is_for("gfx942") for row in rows)
    assert {row.is_for("sm_80") for row in rows} == {False, True}
    assert all(row.is_for("sm_80") for row in rows if not row.is_quantized)


@needs_triton
@pytest.mark.full  # `make aot` compiles all of them
def test_decode_compiles_without_fault_for_both_vendors(tmp_path: Path) -> None:
    path = tmp_path / "aot.json"
    done = _without_interpreter(
        *("-m", "dev.aot", "--targets", "sm_86", "gfx942", "--variants", "decode"),
        *("--json", str(path)),
    )
    assert done.returncode == cli.OK, done.stdout + done.stderr
    binaries = json.loads(path.read_text())
    assert [binary["target"] for binary in binaries] == ["sm_86", "gfx942"]
    for binary in binaries:
        assert binary["usage"]["spill_bytes"] == 0
        assert set(binary["moves"]["loads"]) | set(binary["moves"]["copies"]) == {"128"}
    assert done.stdout.splitlines()[-1].startswith("2 binaries, ")
