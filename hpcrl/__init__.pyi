from hpcrl.launch.run_handle import RunHandle as RunHandle
from hpcrl.launch.run_handle import open_run as open_run
from hpcrl.launch.run_handle import submit as submit

__version__: str
