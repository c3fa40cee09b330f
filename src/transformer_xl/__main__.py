"""`python -m transformer_xl` is `txl`."""

from transformer_xl.cli.main import main

if __name__ == "__main__":
    main()
