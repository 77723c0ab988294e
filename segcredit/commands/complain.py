"""How a command says what went wrong: on stderr, red where there are colours, never wrapped."""


def complain(error: object) -> None:
    """Paths and commands stay in one piece, to be copied."""
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True)
    console.print(f"error: {error}", style="red", markup=False, highlight=False)
