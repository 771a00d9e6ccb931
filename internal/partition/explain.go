package partition

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"holdfast/internal/decode"
)

// explain names the operation that failed and says why in words that lead to
// what has to be done. What a person has to mend is a *decode.Refusal; what
// may be over by itself is not. It is the only place that looks at what a
// connection's error is.
//
// The client library's own words for a connection that was cut ask whether
// SASL is missing, which sends people after the wrong thing when a broker is
// merely restarting.
func (c *Config) explain(doing string, err error) error {
	var said *decode.Refusal
	if err == nil || errors.As(err, &said) {
		return err
	}
	brokers := strings.Join(c.Brokers, ",")
	refuse := func(what, where, why, do string) error {
		return fmt.Errorf("%s: %w", doing, &decode.Refusal{Reason: decode.ReasonSetup, What: what, Where: where, Why: why, Do: do, Err: err})
	}
	login := "check KAFKASINK_SASL_MECHANISM, KAFKASINK_SASL_USER and KAFKASINK_SASL_PASSWORD"
	if c.SASL == nil {
		login = "set KAFKASINK_SASL_MECHANISM, KAFKASINK_SASL_USER and KAFKASINK_SASL_PASSWORD"
	}
	var (
		early   *kgo.ErrFirstReadEOF
		network net.Error
		unknown x509.UnknownAuthorityError
		name    x509.HostnameError
		invalid x509.CertificateInvalidError
		noTLS   tls.RecordHeaderError
		alert   tls.AlertError
	)
	switch {
	case errors.Is(err, errToken):
		return fmt.Errorf("%s: %w", doing, err)
	case errors.Is(err, kerr.SaslAuthenticationFailed):
		return refuse("login", brokers, "the brokers do not accept it: user, password or token is wrong, or has expired", login)
	case errors.Is(err, kerr.UnsupportedSaslMechanism):
		return refuse("login", brokers, "the brokers do not offer this mechanism on the listener", "set KAFKASINK_SASL_MECHANISM to one that they offer, or use another listener's port")
	case errors.Is(err, kerr.IllegalSaslState):
		return refuse("login", brokers, "the listener takes no login, or expects one that was not made", login)
	case errors.Is(err, kerr.TopicAuthorizationFailed):
		return refuse("topic", strings.Join(c.topics(), ", "), "this user may not read, or for a dead-letter topic write, one of them",
			"grant it (kafka-acls --add --allow-principal User:… --operation Read --operation Describe --topic …)")
	case errors.Is(err, kerr.GroupAuthorizationFailed):
		return refuse("consumer group", c.Group, "this user may not use it",
			fmt.Sprintf("grant it (kafka-acls --add --allow-principal User:… --operation Read --operation Describe --group %s)", c.Group))
	case errors.Is(err, kerr.ClusterAuthorizationFailed):
		return refuse("cluster", brokers, "this user may not do that to the cluster", "grant it, or use another user")
	case errors.Is(err, kerr.UnknownTopicOrPartition):
		return refuse("topic", "", "one that is named does not exist", "create it; is its name spelled right?")
	case errors.Is(err, kerr.FencedInstanceID):
		return refuse("instance id", c.InstanceID, "another process of the group has the same KAFKASINK_INSTANCE_ID, and the group let that one in",
			"give each process an id of its own, or stop the other one")
	case errors.As(err, &unknown):
		return refuse("certificate of a broker", brokers, "it is signed by none of the known authorities", "set KAFKASINK_CA_FILE to the certificates that sign the brokers'")
	case errors.As(err, &name):
		return refuse("certificate of a broker", brokers, "it is for another name than the one that was dialed: "+name.Error(), "dial the broker by a name in its certificate, or set KAFKASINK_SERVER_NAME")
	case errors.As(err, &invalid):
		return refuse("certificate of a broker", brokers, "it is not valid: "+invalid.Error(), "renew it, or set the clock right")
	case errors.As(err, &noTLS):
		return refuse("listener", brokers, "it does not speak TLS on this port", "set KAFKASINK_TLS=false, or use the port of the TLS listener")
	case strings.Contains(err.Error(), "tls alert record"): // the library gives it no type
		return refuse("listener", brokers, "it speaks TLS on this port", "set KAFKASINK_TLS=true, or use the port of a listener without TLS")
	case errors.As(err, &alert), strings.Contains(err.Error(), "remote error: tls:"):
		return refuse("TLS handshake", brokers, "the broker refused it, as it does when it wants a client certificate that it knows",
			"set KAFKASINK_CLIENT_CERT_FILE and KAFKASINK_CLIENT_KEY_FILE to a pair that the brokers trust")
	case errors.As(err, &early), errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%s: a broker of %s closed the connection, %s; the client library says: %w", doing, brokers, c.closedBecause(), err)
	case errors.As(err, &network), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%s: no answer from a broker of %s: %w", doing, brokers, err)
	}
	return fmt.Errorf("%s: %w", doing, err)
}

// closedBecause guesses why a broker closes a connection, by how it is made.
func (c *Config) closedBecause() string {
	const restarts = "as one does that restarts, or "
	switch {
	case c.TLS != nil && c.SASL != nil:
		return restarts + "that does not speak TLS on this port (then set KAFKASINK_TLS=false), or that wants no login on it"
	case c.TLS != nil:
		return restarts + "that does not speak TLS on this port (then set KAFKASINK_TLS=false), or that wants a login (then set KAFKASINK_SASL_MECHANISM)"
	case c.SASL != nil:
		return restarts + "that speaks TLS on this port (then set KAFKASINK_TLS=true)"
	}
	return restarts + "that expects TLS or SASL on this port (then set KAFKASINK_TLS=true, or KAFKASINK_SASL_MECHANISM)"
}

// explainDial adds to the error of a connection attempt which address it was
// made to, where that is not one of those in the configuration: the brokers
// give their own addresses, and a wrong one there looks like a network fault
// of ours.
func (c *Config) explainDial(at kgo.BrokerMetadata, err error) error {
	var network net.Error
	if at.NodeID < 0 || !errors.As(err, &network) {
		return err
	}
	address := net.JoinHostPort(at.Host, fmt.Sprint(at.Port))
	for _, seed := range c.Brokers {
		if seed == address {
			return err
		}
	}
	return &decode.Refusal{
		Reason: decode.ReasonSetup, What: "broker", Where: fmt.Sprintf("%d at %s", at.NodeID, address),
		Why:      fmt.Sprintf("this address was given by the brokers %s, and cannot be reached from here", strings.Join(c.Brokers, ",")),
		Expected: "an address in the brokers' advertised.listeners that their clients can reach",
		Do:       "set advertised.listeners of that broker, or KAFKASINK_BROKERS to a listener that is meant for clients here; if the broker is merely down, start it", Err: err,
	}
}
