"""`hpcrl completion`: print the lines by which a shell completes commands, options and files."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])
    parser.epilog = 'example: eval "$(hpcrl completion bash)" in ~/.bashrc; hpcrl completion fish > ~/.config/fish/completions/hpcrl.fish'
    parser.set_defaults(action=_completion)


def _completion(arguments: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["hpcrl"], shell=arguments.shell))
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Write the words that may follow those of a command line for the shell that asks, and end."""
    import argcomplete

    argcomplete.autocomplete(parser, always_complete_options=False)
