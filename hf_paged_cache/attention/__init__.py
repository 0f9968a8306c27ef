"""Paged attention in `transformers`: its functions, masks and views of what is stored."""

from typing import TYPE_CHECKING

from hf_paged_cache._moved import names_in

if not TYPE_CHECKING:  # a type checker shall know what there is and what not
    __getattr__ = names_in(
        __name__, "paged_attention", "AttentionCall", "activate", "deactivate", "observe", "watch"
    )
