"""Parts that every command uses: errors, the machine, models, gauges, statistics, files of results."""
