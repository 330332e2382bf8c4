"""python -m minirl COMMAND [options]

Exit codes: 0 done, 1 the training diverged or runs failed, 2 bad input, 130 interrupted. An error is one line on
standard error; with the environment variable MINIRL_DEBUG=1 it is a traceback.
"""

import difflib
import os
import shlex
import shutil
import sys
import textwrap

import minirl
from minirl.experiments.commands import GROUPS, PROGRAM, all_commands, next_command, options, parse
from minirl.tracking import TrainingDiverged, say


def main(argv=None):
    """Run one command.

    Args:
        argv: list of words; None takes the process's own.
    Returns:
        The exit code.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if not words or words[0] in ("-h", "--help", "help"):
        say(overview())
        return 0
    if words[0] == "--version":
        say(f"minirl {minirl.__version__}")
        return 0
    name, command = words[0], None
    try:
        if name not in all_commands():
            close = difflib.get_close_matches(name, all_commands(), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            return complain(f"no command {name!r}{hint} ({PROGRAM} --help lists all)", 2)
        command = parse(name, words[1:])
        if command is None:
            return 0
        return finish(name, command, command.run())
    except TrainingDiverged as error:
        return complain(f"{name}: {error}. The last good state is in {command.out}", 1)
    except KeyboardInterrupt:
        return complain(how_to_go_on(words, command), 130)
    except BrokenPipeError:  # the reader of our output, `| head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        if os.environ.get("MINIRL_DEBUG"):
            raise
        reason = f"{error.filename}: {error.strerror}" if getattr(error, "filename", None) else error
        more = "" if command else f" ({PROGRAM} {name} --help lists all options)"
        return complain(f"{name}: {reason}{more}", 2)


def complain(message, code):
    """Print one line on standard error; returns `code`."""
    say(f"minirl: {' '.join(message.split())}", sys.stderr)
    return code


def overview():
    """The help on all commands."""
    commands, lines = all_commands(), [f"usage: {PROGRAM} COMMAND [options]"]
    width = min(shutil.get_terminal_size().columns, 110)
    for group in GROUPS:
        lines += ["", group]
        for name, command in commands.items():
            if command.group == group:
                first, others = f"  {name:<19}", " " * 21
                lines += textwrap.wrap(command.summary, width, initial_indent=first, subsequent_indent=others)
    return "\n".join([*lines, "", f"{PROGRAM} COMMAND --help shows its options. New here? {PROGRAM} tour --quick"])


def how_to_go_on(words, command):
    """What to tell who pressed Ctrl-C."""
    if command is None or not command.out or not command.out.is_dir():
        return "interrupted; nothing was written"
    saved = f"interrupted; what was done so far is in {command.out}"
    if "--resume" not in options(command):
        return saved
    return f"{saved}. Go on with: {PROGRAM} {shlex.join(word for word in words if word != '--resume')} --resume"


def finish(name, command, result):
    """Say what came of it; returns the exit code."""
    if isinstance(result, dict) and "before" in result:
        say(f"\n{'':<24}{'before':>10}{'after':>10}")
        for metric, before in result["before"].items():
            say(f"{metric:<24}{before:>10.3g}{result['after'][metric]:>10.3g}")
        say(f"{result['seconds']:.1f} seconds; everything is in {command.out}")
    if following := next_command(name, command):
        say(f"next: {PROGRAM} {following}")
    if isinstance(result, int):
        return result
    return 1 if isinstance(result, tuple) and result[-1] else 0  # (rows, failed runs)


if __name__ == "__main__":
    sys.exit(main())
