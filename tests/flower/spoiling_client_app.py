"""The ClientApp of a federation in which some clients misbehave in another way in every round."""

from __future__ import annotations

from fedsieve_app.spoiled import ROUND_BY_ROUND  # type: ignore[import-not-found]
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedsieve.flower import client
from fedsieve.flower.messages import Order
from fedsieve.flower.records import read

app = ClientApp()


@app.query("hello")  # type: ignore[untyped-decorator, unused-ignore]
def hello(message: Message, context: Context) -> Message:
    return client.hello(message, context)


@app.train("round")  # type: ignore[untyped-decorator, unused-ignore]
def round(message: Message, context: Context) -> Message:
    reply = client.round(message, context)
    misdeeds = ROUND_BY_ROUND[read(message.content, "order", Order).round]
    if context.node_config["client"] not in misdeeds:
        return reply
    spoil, _ = misdeeds[context.node_config["client"]]
    spoiled: Message = spoil(message, reply)
    return spoiled


@app.evaluate("finish")  # type: ignore[untyped-decorator, unused-ignore]
def finish(message: Message, context: Context) -> Message:
    return client.finish(message, context)
