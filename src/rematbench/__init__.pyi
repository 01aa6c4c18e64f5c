from rematbench.api import Estimate as Estimate
from rematbench.api import MethodError as MethodError
from rematbench.api import Problem as Problem
from rematbench.api import Result as Result
from rematbench.api import compare as compare
from rematbench.api import estimate as estimate
from rematbench.api import load_method as load_method
from rematbench.api import search as search
from rematbench.api import simulate as simulate

__version__: str
