// Questions for the first page. They are few and plain: they show what to do, not what the model can do.

const COMMON = ["Why is the sky blue?", "Write a short poem about rain.", "What is the capital of Australia?"];
const DEMO = ["What is paged attention?", "How many GPUs does Llama 3 70B need?", "How do I get JSON?"];

/** Questions that suit a model of /v1/models. The demo model that comes with Penstock knows little but its own subject. */
export const examplesFor = ({ id, root }) => (/\bdemo\b/.test(`${id} ${root}`) ? DEMO : COMMON);
