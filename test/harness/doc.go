// Package harness starts the real servers that Holdfast is tested against, and
// Holdfast's own commands, as child processes of the test or of the demo:
//
//   - [Postgres], a private cluster from the server binaries of the machine;
//   - [Kafka], a real Apache Kafka broker in KRaft mode from its published jars;
//   - [FakeKafka], franz-go's in-process broker, for tests that must be fast;
//   - [Daemon], a command of this module, built once and run as a process;
//   - [Proxy], a TCP proxy that cuts, stalls and counts.
//
// It promises that everything listens on 127.0.0.1 only, that a child dies with
// the process that started it, that Close waits until a child is gone, and that
// nothing is ever skipped: what cannot be started is an error that says what is
// missing and how to get it. It does not promise durability (Postgres runs with
// fsync off) and knows nothing of Feldera.
//
// Functions named Start… return errors and take a context, which bounds the
// start and not the life of what was started. Functions named Need… are the thin
// wrappers for tests: they fail the test, and clean up at its end.
//
// What is slow to make (an initialised cluster, the broker's jars, its class
// archive, built commands) is kept in [CacheDir] and shared by all test
// processes of the machine under file locks.
package harness
