"""What OpenAI's clients send and get, as the OpenAPI document shows it."""

from typing import Annotated, Any, Literal, Optional

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Window = Annotated[int, Field(ge=1, le=1 << 20)]
Count = Annotated[int, Field(ge=1, le=1 << 31)]
Text = Annotated[str, Field(max_length=1 << 24)]
StopText = Annotated[str, Field(min_length=1, max_length=512)]
StopTexts = Annotated[list[StopText], Field(max_length=16)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class Strict(BaseModel):
    """Takes the fields that it names, in their own types, and no others."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class FunctionCall(Strict):
    name: Name
    arguments: Text = "{}"


class ToolCall(Strict):
    id: Optional[str] = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Optional[int] = None


class Message(Strict):
    """A turn. Text only; what assistants' turns carry beside it is taken and left alone."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Optional[Text | Annotated[list[TextPart], Field(max_length=4096)]] = None
    name: Optional[str] = None
    tool_calls: Optional[list[ToolCall]] = None
    tool_call_id: Optional[str] = None
    reasoning_content: Optional[Text] = None
    refusal: Any = None
    annotations: Any = None
    audio: None = None
    function_call: None = None


class Function(Strict):
    name: Name
    description: Optional[Text] = None
    parameters: Optional[dict[str, Any]] = None
    strict: Optional[bool] = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class StreamOptions(Strict):
    include_usage: Optional[bool] = None


class JsonSchema(Strict):
    name: Name
    description: Optional[str] = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: Optional[bool] = None


class TextFormat(Strict):
    type: Literal["text"]


class JsonFormat(Strict):
    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonFormat | JsonSchemaFormat, Field(discriminator="type")]


TokenId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]  # one spelling for a number


class Drawing(Strict):
    """What chat and plain completions share."""

    model: Name = "local"
    adapter: Optional[Name] = Field(None, description='a mounted adapter, or "none" for the base')
    stream: Optional[bool] = None
    stream_options: Optional[StreamOptions] = None
    max_tokens: Optional[Count] = None
    n: Optional[Annotated[int, Field(ge=1, le=128)]] = None
    stop: Optional[StopText | StopTexts] = None
    seed: Optional[Seed] = None
    temperature: Optional[Annotated[float, Field(ge=0, le=10)]] = None
    top_p: Optional[Annotated[float, Field(gt=0, le=1)]] = None
    top_k: Optional[Annotated[int, Field(ge=0, le=1 << 24)]] = None
    min_p: Optional[Share] = None
    xtc_probability: Optional[Share] = None
    xtc_threshold: Optional[Annotated[float, Field(ge=0, le=0.5)]] = None
    logit_bias: Optional[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]]] = None
    repetition_penalty: Optional[Annotated[float, Field(gt=0, le=10)]] = None
    repetition_context_size: Optional[Window] = None
    presence_penalty: Optional[Penalty] = None
    presence_context_size: Optional[Window] = None
    frequency_penalty: Optional[Penalty] = None
    frequency_context_size: Optional[Window] = None
    user: Optional[str] = Field(None, description="taken, without effect")


class ChatRequest(Drawing):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Optional[Count] = Field(None, description="wins over max_tokens")
    logprobs: Optional[bool] = None
    top_logprobs: Optional[Annotated[int, Field(ge=0, le=20)]] = None
    tools: Optional[Annotated[list[Tool], Field(max_length=256)]] = None
    tool_choice: Optional[Literal["none", "auto"]] = None
    parallel_tool_calls: Optional[Literal[True]] = None
    response_format: Optional[ResponseFormat] = None
    reasoning_effort: Optional[Literal["none", "minimal", "low", "medium", "high", "xhigh"]] = None
    chat_template_kwargs: Optional[dict[str, Any]] = None
    metadata: Optional[dict[str, str]] = Field(None, description="taken, without effect")
    store: Optional[Literal[False]] = None


class CompletionRequest(Drawing):
    prompt: Annotated[str, Field(min_length=1, max_length=1 << 24)]
    logprobs: Optional[Annotated[int, Field(ge=0, le=20)]] = None
    echo: Optional[Literal[False]] = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class Choice(BaseModel):
    index: int
    message: dict[str, Any]
    logprobs: Optional[dict[str, Any]]
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: Optional[dict[str, Any]]
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ErrorBody(BaseModel):
    message: str
    type: str
    param: Optional[str]
    code: Optional[str]


class ErrorAnswer(BaseModel):
    error: ErrorBody


class ModelEntry(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_window: int
    max_tokens: int
    reasoning: bool
    tools: bool
    input: list[str]
    parent: Optional[str]


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelEntry]


class AdapterEntry(BaseModel):
    id: str
    object: Literal["adapter"]
    path: str
    kind: str
    rank: int
    scale: float
    bytes: int
    layers: int


class AdapterList(BaseModel):
    object: Literal["list"]
    data: list[AdapterEntry]
    default: Optional[str]


class MountRequest(Strict):
    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    path: Annotated[str, Field(min_length=1, max_length=4096, description="a folder on the server's machine")]


class Unmounted(BaseModel):
    id: str
    object: Literal["adapter"]
    deleted: bool


class Health(BaseModel):
    status: Literal["ok", "draining"]
    active: int
    waiting: int
