"""`python -m gen_worker.tools.doctor --home DIR`: see `report`."""

from gen_worker.tools.doctor.report import main
from gen_worker.tools.program import run_tool

if __name__ == "__main__":
    run_tool(main)
