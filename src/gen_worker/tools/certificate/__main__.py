"""`python -m gen_worker.tools.certificate MODULE:SYMBOL --output DIR`: see `certify`."""

from gen_worker.tools.certificate.certify import main
from gen_worker.tools.program import run_tool

if __name__ == "__main__":
    run_tool(main)
