"""``python -m experiments.gpu_suite``: see ``experiments.gpu_suite.suite``."""

import sys

from outrider.experiments.gpu_suite.suite import main

if __name__ == "__main__":
    sys.exit(main())
