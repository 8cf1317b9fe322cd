// Clients of the epilora services, made at run time from the proto files.
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

const PROTOS = fileURLToPath(new URL('../../../protos', import.meta.url));
const MAX_MESSAGE_BYTES = 64 << 20;

/** Clients of the two services that an application needs, on one address ("host:port"). */
export function connect(address, protos = PROTOS) {
  const files = ['adapter_service', 'generation_service'].map((name) => path.join('epilora/v1', `${name}.proto`));
  const definition = protoLoader.loadSync(files, {
    includeDirs: [protos],
    // Field names as in the protos. Without this they are camelCase, and an unknown name in a request is dropped
    // without an error: adapter_name would be lost, and the base model would answer.
    keepCase: true,
    // int64 (generations, byte counts) does not fit a JavaScript number: it comes as a string.
    longs: String,
    enums: String,
    defaults: true,
    oneofs: true,
  });
  const { AdapterService, GenerationService } = grpc.loadPackageDefinition(definition).epilora.v1;
  const credentials = grpc.credentials.createInsecure();
  const options = { 'grpc.max_receive_message_length': MAX_MESSAGE_BYTES };
  return {
    adapters: new AdapterService(address, credentials, options),
    generation: new GenerationService(address, credentials, options),
  };
}

/** A deadline for one call; without one a call may wait for ever. */
export function within(seconds) {
  return { deadline: new Date(Date.now() + seconds * 1000) };
}

/** Loads an adapter and resolves to it once requests may name it. */
export function loadAdapter(adapters, request, seconds) {
  return new Promise((resolve, reject) => {
    adapters.LoadAdapter(request, within(seconds), (error, response) =>
      error ? reject(error) : resolve(response.adapter),
    );
  });
}

/** The messages of one generation, as they come. */
export function generate(generation, request, seconds) {
  return generation.Generate(request, within(seconds));
}
