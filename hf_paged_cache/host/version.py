"""Which `transformers` this package needs, said before anything that an older one lacks is imported."""

from __future__ import annotations

import transformers
from packaging.version import Version

MINIMUM_TRANSFORMERS = "5.17"

if Version(transformers.__version__) < Version(MINIMUM_TRANSFORMERS):
    raise ImportError(
        f"hf_paged_cache needs transformers >= {MINIMUM_TRANSFORMERS}, and {transformers.__version__} is "
        f"installed; run `pip install -U 'transformers>={MINIMUM_TRANSFORMERS},<6'`"
    )
