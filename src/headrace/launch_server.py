"""`python -m headrace.launch_server`: the same as `headrace serve`, as SGLang's server is started."""

import sys

from headrace.cli import main

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]])
