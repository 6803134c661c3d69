"""`python -m mvllm.cli`: the same as the `mvllm` command."""

from mvllm.cli.main import main

main()
