"""The command ``uefl`` in this process."""

from typer.testing import CliRunner

from uefl.cli import app


def cli(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def accepted(*arguments):
    """Return the output of a command that succeeds."""
    result = cli(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments):
    """Return the message of a command that ends with one line and exit code 2."""
    result = cli(*arguments)
    assert result.exit_code == 2, result.output
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)
    (line,) = result.output.strip().splitlines()
    return line
