"""`python -m flashmoe_gguf.cli` is `flashmoe`."""

from flashmoe_gguf.cli import main

main(prog_name="flashmoe")
