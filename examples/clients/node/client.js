#!/usr/bin/env node
// Loads an adapter (if asked to) and streams a generation.
//
//   node client.js --address 127.0.0.1:50051 --adapter poet --source /path/of/adapter --prompt 'Q: Who keeps the lamp?'
//
// The text goes to standard output as it comes, all else to standard error. Exit status 1 on an error of the service.
import { parseArgs } from 'node:util';
import grpc from '@grpc/grpc-js';
import { detailsOf } from './details.js';
import { connect, generate, loadAdapter } from './epilora.js';

const { values } = parseArgs({
  options: {
    address: { type: 'string', default: '127.0.0.1:50051' },
    adapter: { type: 'string', default: '' },
    source: { type: 'string', default: '' },
    prompt: { type: 'string' },
    'max-tokens': { type: 'string', default: '64' },
    timeout: { type: 'string', default: '120' },
  },
});
if (!values.prompt) {
  console.error('--prompt is needed');
  process.exit(2);
}

function explain(error) {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  for (const { name, value } of detailsOf(error)) console.error(`  ${name} ${JSON.stringify(value)}`);
}

try {
  const { adapters, generation } = connect(values.address);
  const seconds = Number(values.timeout);
  if (values.source) {
    const adapter = await loadAdapter(adapters, { name: values.adapter, source: values.source }, seconds);
    console.error(`${adapter.name}: generation ${adapter.generation}, ${adapter.report.expert_layout} experts`);
  }
  const request = {
    text: values.prompt,
    adapter_name: values.adapter,
    stop: { max_tokens: Number(values['max-tokens']) },
  };
  for await (const message of generate(generation, request, seconds)) {
    process.stdout.write(message.text);
    if (message.usage) {
      const { num_prompt_tokens, num_generated_tokens } = message.usage;
      console.error(`\n${message.finish_reason}: ${num_prompt_tokens} tokens in, ${num_generated_tokens} out`);
    }
  }
} catch (error) {
  if (error.code === undefined) throw error;
  explain(error);
  process.exitCode = 1;
}
