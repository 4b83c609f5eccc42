"""A link between two engines that can be slow, cut, or changed on its way: a proxy of one TCP port."""

import contextlib
import socket
import threading


class Link:
    """Listens on a port of its own and passes everything on to `port`, and what comes back through `change`."""

    def __init__(self, port: int):
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self.passed = 0
        self.stalled = threading.Event()
        self.restore()
        threading.Thread(target=self._accept, daemon=True).start()

    def restore(self):
        """From now on it is a good link."""
        self.allowed = None  # bytes that still come back; None: any number. Then it stands still
        self.cut_after = None  # bytes that still come back before the connection is cut
        self.change = lambda data: data

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                return
            self._open += [near, far]
            threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source, target, back):
        try:
            while data := source.recv(1 << 14):
                if back:
                    data = self.change(data)
                    if self.allowed is not None and self.passed + len(data) > self.allowed:
                        target.sendall(data[: max(0, self.allowed - self.passed)])
                        self.stalled.set()
                        threading.Event().wait()  # for ever: the thread is a daemon
                    if self.cut_after is not None and self.passed + len(data) > self.cut_after:
                        target.sendall(data[: max(0, self.cut_after - self.passed)])
                        break
                    self.passed += len(data)
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._listener.close()
        for connection in self._open:
            connection.close()
