"""`trajlake completion`: the script that teaches a shell to complete our commands."""

import click


@click.command(
    epilog="The script asks trajlake itself, so it stays right after an upgrade.",
    short_help="Print the script for a shell's completion.",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the script that makes a shell complete commands, options and column names.

    \b
    Examples:
      eval "$(trajlake completion bash)"               now; put the line into ~/.bashrc for ever
      trajlake completion zsh > ~/.zfunc/_trajlake
      trajlake completion fish > ~/.config/fish/completions/trajlake.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    completer = kind(ctx.find_root().command, {}, "trajlake", "_TRAJLAKE_COMPLETE")
    # `.source()` would start the shell to check its version; the script itself needs no such thing.
    click.echo(completer.source_template % completer.source_vars())
