"""Run commands of `posttrain` as a light installation would: importing a package of an extra fails as if it were missing.

Arguments: the packages, separated by commas, and a JSON list of commands, each a list of words. Prints a JSON list with
the exit code and the text on stderr of each command.
"""

import contextlib
import io
import json
import sys


class Hiding:
    """A finder that finds what `finder` finds, except the packages of the extras."""

    def __init__(self, finder, packages):
        self.finder, self.packages = finder, packages

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self.packages else self.finder.find_spec(name, path, target)


def outcome(words):
    from posttrain.cli.main import main

    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            code = main(words)
        except SystemExit as error:
            code = error.code
    return code, said.getvalue()


if __name__ == "__main__":
    sys.meta_path[:] = [Hiding(finder, sys.argv[1].split(",")) for finder in sys.meta_path]
    outcomes = [outcome(words) for words in json.loads(sys.argv[2])]
    print(json.dumps(outcomes))
