"""Draw several figures in one process, because the import of seaborn takes longer than a drawing.

usage: draw.py DIR NAME=TABLE.csv[,TABLE.csv] [...]   (figures/NAME.py draws DIR/NAME.pdf)
"""

import runpy
import sys
from pathlib import Path


def main() -> None:
    if len(sys.argv) < 3 or not all("=" in word for word in sys.argv[2:]):
        raise SystemExit("usage: draw.py DIR NAME=TABLE.csv[,TABLE.csv] [...]")
    folder, drawn = Path(sys.argv[1]), [word.split("=", 1) for word in sys.argv[2:]]
    for name, tables in drawn:
        script = Path(__file__).with_name(f"{name}.py")
        sys.argv = [str(script), *tables.split(","), str(folder / f"{name}.pdf")]
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
