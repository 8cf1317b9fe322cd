// What a google.rpc.Status in an error's trailing metadata says beyond code and message.
import protobuf from 'protobufjs';

const { root } = protobuf.parse(`
  syntax = "proto3";
  package google.rpc;
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
  message FieldViolation { string field = 1; string description = 2; }
  message BadRequest { repeated FieldViolation field_violations = 1; }
  message Duration { int64 seconds = 1; int32 nanos = 2; }
  message RetryInfo { Duration retry_delay = 1; }
`, { keepCase: true });

/** The error's details as {name, value}, e.g. {name: "ErrorInfo", value: {reason, domain, metadata}}. */
export function detailsOf(error) {
  const [bytes] = error.metadata?.get('grpc-status-details-bin') ?? [];
  if (!bytes) return [];
  const status = root.lookupType('google.rpc.Status').decode(bytes);
  return status.details.flatMap(({ type_url, value }) => {
    const name = type_url.split('.').pop();
    const type = root.nested.google.nested.rpc.get(name);
    return type ? [{ name, value: type.toObject(type.decode(value), { longs: Number, defaults: true }) }] : [];
  });
}
