"""The generative types that the installed transformers registers."""

import difflib
from dataclasses import dataclass

from transformers.models.auto import modeling_auto

from eval.core.errors import UsageError

SEQ2SEQ = "/seq2seq"


@dataclass(frozen=True)
class Entry:
    """A model class to look at."""

    name: str  # what `--types` calls it: the type, with `/seq2seq` where that has a decoder alone too
    model_type: str  # the type, as configs call it
    class_name: str  # the class in `transformers`
    has_encoder: bool = False  # it is registered among the encoder-decoders


def entries() -> dict[str, Entry]:
    """All of them by name, sorted."""
    decoders = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    others = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    found = {}
    for model_type, names in (*decoders.items(), *others.items()):
        is_second = model_type in found
        key = model_type + SEQ2SEQ if is_second else model_type
        class_name = names if isinstance(names, str) else names[0]
        found[key] = Entry(key, model_type, class_name, has_encoder=is_second or model_type not in decoders)
    return dict(sorted(found.items()))


def chosen(types: str | None) -> list[Entry]:
    """The entries of a comma-separated list, or all; `UsageError` for an unknown type, or none at all."""
    known = entries()
    if types is None:
        return list(known.values())
    names = [name.strip() for name in types.split(",") if name.strip()]
    if not names:
        raise UsageError("--types names no type; leave it away for all")
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
            hint = f"; did you mean: {', '.join(close)}" if close else ""
            raise UsageError(f"transformers registers no generative type {name!r}{hint}")
    return [known[name] for name in dict.fromkeys(names)]
