"""The engine's server as a real process, for the tests of its HTTP side."""

import re
import subprocess
import sys

import httpx

MODEL = "smollm2-135m"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def encode_chat(model, messages, extras, most_tokens=8192):
    """Token ids of a conversation, its template rendered in this process."""
    prompt = model.conversation(messages, extras, most_tokens)
    asked = prompt.asked
    text = model.template.render(
        asked.messages, add_generation_prompt=asked.add_generation_prompt, variables=asked.variables
    )
    return model.chat_ids(prompt, text)


class Server:
    """`python -m engine` on a free port."""

    def __init__(self, path, *options):
        command = [sys.executable, "-m", "engine", "--model", str(path), "--served-name", MODEL, "--port", "0"]
        command += ["--threads", "1", "--precision", "float32", "--max-model-len", "1024", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        match = re.search(r"http://\S+", line)
        assert match, f"the server did not start: {line!r}, exit code {self.process.poll()}"
        self.url = match[0]
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def wait_ready(self):
        # Each probe waits in the server's own event loop for at most its time-out, so this does not spin.
        for _ in range(600):
            if self.http.get("/health").status_code == 200:
                return self
            try:
                self.process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"the server ended with {self.process.returncode}")
        raise AssertionError("the model was not loaded in two minutes")

    def post(self, path, **body):
        return self.http.post(path, json={"model": MODEL, **body})

    def complete(self, prompt, **body):
        response = self.post("/v1/completions", prompt=prompt, temperature=0, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name):
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(name.rstrip("}")):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name}")

    def pages(self, state):
        return self.metric(f'tierline_engine_pages{{model="{MODEL}",state="{state}"}}')

    def settle(self):
        """Wait for two health echoes: everything sent before has gone through the loop and its numbers are here."""
        for _ in range(2):
            assert self.http.get("/health").status_code == 200

    def wait_idle(self):
        for _ in range(2000):
            self.settle()
            if self.metric("tierline_engine_running") + self.metric("tierline_engine_waiting") == 0:
                return
        raise AssertionError("the engine does not become idle")

    def stop(self):
        self.http.close()
        self.process.terminate()
        code = self.process.wait(30)
        self.process.stdout.close()
        return code
