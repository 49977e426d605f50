"""What a user of locust does: chats, streamed and whole. Runs in an environment that has ``locust`` and nothing of ours."""

import json
import time

from locust import HttpUser, constant, task

HOURS = ("eight", "nine", "ten", "eleven")


class Chatter(HttpUser):
    """Asks one question after the other."""

    wait_time = constant(0)

    def on_start(self) -> None:
        """Learns the name of the model."""
        self.model = self.client.get("/v1/models").json()["data"][0]["id"]
        self.asked = 0

    def body(self) -> dict[str, object]:
        """The next question."""
        self.asked += 1
        prompt = f"Context:\nThe library opens at {HOURS[self.asked % 4]}.\n\nQuestion: When does the library open?"
        return {"model": self.model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 100, "temperature": 0}

    @task
    def whole(self) -> None:
        """A chat that is answered at once."""
        with self.client.post("/v1/chat/completions", json=self.body(), name="whole", catch_response=True) as response:
            if response.status_code != 200 or not response.json()["choices"][0]["message"]["content"]:
                response.failure(f"HTTP {response.status_code}: {response.text[:200]}")

    @task
    def streamed(self) -> None:
        """A chat that is streamed; its first text is an entry of its own."""
        began, text, done = time.perf_counter(), "", False
        body = self.body() | {"stream": True}
        with self.client.post("/v1/chat/completions", json=body, name="stream", stream=True, catch_response=True) as response:
            for line in response.iter_lines():
                if line == b"data: [DONE]":
                    done = True
                elif line.startswith(b"data: "):
                    added = json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                    if added and not text:
                        self._first_text(1e3 * (time.perf_counter() - began))
                    text += added
            if not (done and text):
                response.failure(f"HTTP {response.status_code}, {len(text)} characters, ended: {done}")

    def _first_text(self, milliseconds: float) -> None:
        self.environment.events.request.fire(
            request_type="SSE", name="first text", response_time=milliseconds, response_length=0, exception=None, context={}
        )
