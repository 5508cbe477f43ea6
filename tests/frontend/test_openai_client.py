"""The official client works unchanged."""

import openai

from tests.frontend.live_server import LiveServer

HELLO = [{"role": "user", "content": "Hello"}]
TEXT = "Water runs down the pipe, and the gate opens."


def test_chat(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(TEXT, num_cached_tokens=16)
    answer = client.chat.completions.create(model="test/model", messages=HELLO)  # type: ignore[call-overload]
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "test/model"
    [choice] = answer.choices
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", TEXT)
    assert choice.finish_reason == "stop"
    num_prompt = len(
        live.tokenizer.encode("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    )
    num_output = len(live.tokenizer.encode(TEXT, add_special_tokens=False)) + 1
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.completion_tokens == num_output
    assert answer.usage.total_tokens == num_prompt + num_output
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
