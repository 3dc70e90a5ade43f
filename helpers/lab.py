"""Start JupyterLab, with a few lines of the series in place of its log. Takes the options of `jupyter lab`."""

import os
import sys
import tempfile
from pathlib import Path

import zmq
from jupyterlab.labapp import LabApp

READY = """
The series is open in JupyterLab{where}. If no browser window came up, open this address:

    {address}

There, click the first cell of code and press Shift+Enter: it runs, and the next cell is selected.
To stop, save what you wrote (Ctrl+S), and press Ctrl+C here, twice.
"""


class Server(LabApp.serverapp_class):
    """Jupyter's server. It says its address once, and says when that is not the usual one."""

    def init_configurables(self):
        """What the server and a kernel say to each other is encrypted; else every kernel warns that it is not."""
        if zmq.has("curve"):
            self.config.MappingKernelManager.setdefault("transport_encryption", "auto")
        super().init_configurables()

    def init_httpserver(self):
        asked = self.port
        super().init_httpserver()
        self.where = "" if self.port == asked else f", on port {self.port} because {asked} is in use"

    def start_app(self):
        self.log.addFilter(lambda entry: f"127.0.0.1:{self.port}" not in entry.getMessage())
        super().start_app()
        print(READY.format(where=self.where, address=self.public_url), flush=True)


LabApp.serverapp_class = Server

# Where in the home folder Jupyter and IPython keep what they write, by the variables that say another place.
FOLDERS = {
    "JUPYTER_CONFIG_DIR": ".jupyter",
    "JUPYTER_DATA_DIR": "Library/Jupyter" if sys.platform == "darwin" else ".local/share/jupyter",
    "IPYTHONDIR": ".ipython",
}


def folders_in_place_of_unwritable_ones():
    """Variables for the environment, so that JupyterLab starts where the home folder, or a part of it, is read-only."""
    homeless = [name for name, folder in FOLDERS.items() if not (os.environ.get(name) or _is_writable(folder))]
    return {name: tempfile.mkdtemp(prefix="jupyter-") for name in homeless}


def _is_writable(folder):
    folder = Path.home() / folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    # For the kernels. NumPy's products here are small; where another program keeps a core busy, two threads that wait
    # for each other made a cell of notebook 12 take 42 seconds in place of 3.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ |= folders_in_place_of_unwritable_ones()
    LabApp.launch_instance()
