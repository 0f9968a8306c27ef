"""Pictures and numbers of a cache: statistics, HTML for notebooks, figures."""
