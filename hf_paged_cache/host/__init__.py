"""`transformers`, CPython and torch as this package finds them; versions of the first go by `VERSION`."""

import transformers
from packaging.version import Version

MINIMUM_TRANSFORMERS = "5.17"
VERSION = Version(transformers.__version__)

if Version(MINIMUM_TRANSFORMERS) > VERSION:  # before anything is imported that it lacks
    raise ImportError(
        f"hf_paged_cache needs transformers >= {MINIMUM_TRANSFORMERS}, and {transformers.__version__} is "
        f"installed; run `pip install -U 'transformers>={MINIMUM_TRANSFORMERS},<6'`"
    )
