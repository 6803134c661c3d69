"""`python -m mvllm`: the same as the command `mvllm`."""

from mvllm.cli.main import main

if __name__ == "__main__":
    main()
