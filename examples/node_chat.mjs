// Streams the answer to a chat message from JavaScript, with the protos of this repository and no generated code.
//
//   npm install && node node_chat.mjs [HOST:PORT] [MESSAGE]

import path from "node:path";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const address = process.argv[2] ?? "127.0.0.1:50051";
const message = process.argv[3] ?? "What is the capital of France? Answer in one sentence.";
const protos = process.env.TAKT_PROTOS ?? path.resolve(path.dirname(fileURLToPath(import.meta.url)), "../protos");

const definition = protoLoader.loadSync("takt/v1/inference.proto", {
  includeDirs: [protos],
  keepCase: true,
  defaults: true,
  oneofs: true,
  enums: String,
  longs: Number,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).takt.v1;
const client = new InferenceService(address, grpc.credentials.createInsecure());

const call = client.Chat({
  messages: [{ role: "user", content: message }],
  sampling: { temperature: 0, max_tokens: 50 },
});
call.on("data", (response) => {
  process.stdout.write(response.text);
  if (response.finish_reason) {
    const { prompt_tokens, completion_tokens } = response.usage;
    process.stderr.write(`\n${response.finish_reason}: ${prompt_tokens} + ${completion_tokens} tokens\n`);
  }
});
call.on("end", () => client.close());
call.on("error", (error) => {
  process.stderr.write(`${grpc.status[error.code]}: ${error.details}\n`);
  process.exitCode = 1;
  client.close();
});
