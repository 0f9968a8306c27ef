"""Reports of a run: the table in the terminal, and the files of its folder."""

from eval.report.files import read as read
from eval.report.files import results_json as results_json
from eval.report.files import write as write
from eval.report.terminal import table as table
