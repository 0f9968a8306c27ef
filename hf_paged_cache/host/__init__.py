"""`transformers`, CPython and torch as this package finds them.

What depends on the version of `transformers` goes by `VERSION`, and one that is too old is refused before
anything is imported that it lacks.
"""

import transformers
from packaging.version import Version

MINIMUM_TRANSFORMERS = "5.17"
VERSION = Version(transformers.__version__)

if Version(MINIMUM_TRANSFORMERS) > VERSION:
    raise ImportError(
        f"hf_paged_cache needs transformers >= {MINIMUM_TRANSFORMERS}, and {transformers.__version__} is "
        f"installed; run `pip install -U 'transformers>={MINIMUM_TRANSFORMERS},<6'`"
    )
