"""A rank for tests that does not do what it should: `crew.py` starts it as it would the real one.

What it does instead stands in the environment variable TIERLINE_TEST_RANK.
"""

import os
import signal
import socket
import sys
import time

from engine.lifeline import die_with_parent
from engine.messages import encode_frame
from engine.parallel.follower import Reporter
from engine.parallel.reports import ALIVE_SECONDS, Failed, Loaded

if __name__ == "__main__":
    descriptor, parent_pid, rank, meeting, config = sys.argv[1:]
    die_with_parent(int(parent_pid))
    connection = socket.socket(fileno=int(descriptor))
    match os.environ["TIERLINE_TEST_RANK"]:
        case "fails":
            connection.sendall(encode_frame(Failed("too little memory")))
        case "exits":
            sys.exit(7)
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "loads":
            connection.sendall(encode_frame(Loaded()))
        case "falls silent":
            Reporter(connection).tell(Loaded())
            time.sleep(3 * ALIVE_SECONDS)
            os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)
