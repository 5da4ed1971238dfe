"""`python -m benchmarks.cache`: the cache's cost, policies and layouts, or one of them."""

import typer

from benchmarks.cache import cost, layouts, policies

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.command("cost")(cost.main)
app.command("policies")(policies.main)
app.command("layouts")(layouts.main)

if __name__ == "__main__":
    app()
