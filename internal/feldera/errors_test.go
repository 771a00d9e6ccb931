package feldera

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"holdfast/internal/decode"
)

// Every row of the contract's table of errors, the manager's own answers, and
// the endings without an answer, each for a request that changes something and
// for one that does not.
func TestClassify(t *testing.T) {
	for _, c := range []struct {
		status        int
		code          string
		read, mutates Class
	}{
		{400, "ParseErrors", ClassRefuseRecord, ClassRefuseRecord},
		{400, "InvalidParam", ClassStopOperator, ClassStopOperator},
		{400, "ConfigError.ParserConfigParseError", ClassStopOperator, ClassStopOperator},
		{400, "ConfigError.InputFormatNotSupported", ClassStopOperator, ClassStopOperator},
		{400, "ConfigError.UnknownInputFormat", ClassStopOperator, ClassStopOperator},
		{400, "NoTransactionInProgress", ClassRetryUncertain, ClassRetryUncertain},
		{400, "AdHocQueryError", ClassStopOperator, ClassStopOperator},
		{400, "InvalidTransition", ClassStopOperator, ClassStopOperator},
		{400, "IncarnationUuidMismatch", ClassOtherIncarnation, ClassOtherIncarnation},
		{401, "AuthenticationFailed", ClassStopOperator, ClassStopOperator},
		{403, "InsufficientPermissions", ClassStopOperator, ClassStopOperator},
		{404, "ConfigError.UnknownInputStream", ClassStopOperator, ClassStopOperator},
		{404, "UnknownInputEndpoint", ClassStopOperator, ClassStopOperator},
		{404, "UnknownPipelineName", ClassStopOperator, ClassStopOperator},
		{404, "", ClassStopOperator, ClassStopOperator},
		{408, "", ClassRetry, ClassRetryUncertain},
		{409, "TransactionInProgress", ClassRetry, ClassRetry},
		{410, "PipelineRestarted", ClassOtherIncarnation, ClassOtherIncarnation},
		{410, "UnknownEndpointInCompletionToken", ClassOtherIncarnation, ClassOtherIncarnation},
		{410, "Terminating", ClassRetry, ClassRetryUncertain},
		{413, "", ClassStopOperator, ClassStopOperator},
		{429, "ApiConnectionLimit", ClassRetry, ClassRetry},
		{500, "InputTransportError", ClassRetry, ClassRetryUncertain},
		{500, "DbspPanic", ClassRetry, ClassRetryUncertain},
		{501, "EnterpriseFeature", ClassStopOperator, ClassStopOperator},
		{501, "", ClassStopOperator, ClassStopOperator},
		{502, "", ClassRetry, ClassRetryUncertain},
		{503, "Initializing", ClassRetry, ClassRetry},
		{503, "AwaitingApproval", ClassRetry, ClassRetry},
		{503, "Suspended", ClassRetry, ClassRetry},
		{503, "RestoreInProgress", ClassRetry, ClassRetry},
		{503, "BootstrapInProgress", ClassRetry, ClassRetry},
		{503, "PipelineInteractionNotDeployed", ClassRetry, ClassRetry},
		{503, "PipelineUnavailable", ClassRetry, ClassRetry},
		{503, "PipelineInteractionUnreachable", ClassRetry, ClassRetryUncertain},
		{503, "", ClassRetry, ClassRetryUncertain},
		{504, "", ClassRetry, ClassRetryUncertain},
		{200, "", ClassRetry, ClassRetryUncertain}, // a body that is not the promised one
		{302, "", ClassStopOperator, ClassStopOperator},
		{0, "", ClassRetry, ClassRetryUncertain},
	} {
		for mutates, want := range map[bool]Class{false: c.read, true: c.mutates} {
			e := &Error{Endpoint: "x", Status: c.status, Code: c.code, Mutates: mutates, Sent: true}
			if got := Classify(fmt.Errorf("wrapped: %w", e)); got != want {
				t.Errorf("%d %s, mutates %v: %s, want %s", c.status, c.code, mutates, got, want)
			}
		}
	}
	for _, c := range []struct {
		err  error
		want Class
	}{
		{&Error{Mutates: true, Sent: false, Err: errors.New("connection refused")}, ClassRetry},
		{&Error{Mutates: true, Err: &tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}}, ClassStopOperator},
		{&IncarnationChanged{Was: "a"}, ClassOtherIncarnation},
		{&decode.Refusal{Reason: decode.ReasonRejected}, ClassRefuseRecord},
		{&decode.Refusal{Reason: decode.ReasonSetup}, ClassStopOperator},
		{context.Canceled, ClassRetry},
	} {
		if got := Classify(c.err); got != c.want {
			t.Errorf("%v: %s, want %s", c.err, got, c.want)
		}
	}
}

// An error of every class must be readable and bounded, whatever the body was.
func TestErrorBodies(t *testing.T) {
	for _, c := range []struct {
		name, body, code, message string
	}{
		{"the server's", `{"message":"no","error_code":"Initializing","details":null}`, "Initializing", "no"},
		{"details of another shape", `{"message":"no","error_code":"X","details":{"errors":"text"}}`, "X", "no"},
		{"details as text", `{"message":"no","error_code":"X","details":"text"}`, "X", "no"},
		{"html", "<html><body>\n<h1>502 Bad Gateway</h1>", "", "answer is not the server's JSON: <html><body> <h1>502 Bad Gateway</h1>"},
		{"nothing", "", "", "answer is not the server's JSON: "},
		{"cut short", `{"message":"no","error_code":"Ini`, "", `answer is not the server's JSON: {"message":"no","error_code":"Ini`},
		{"bytes that are no text", "\xff\x00\x1b[31m", "", "answer is not the server's JSON: \uFFFD  [31m"},
	} {
		e := &Error{Endpoint: "ingress", Status: http.StatusServiceUnavailable}
		e.decodeError([]byte(c.body), nil, asIs)
		if e.Code != c.code || e.Message != c.message {
			t.Errorf("%s: code %q, message %q", c.name, e.Code, e.Message)
		}
	}
	e := &Error{Status: 400}
	e.decodeError([]byte(`{"message":"`+strings.Repeat("m", 1e6)+`","error_code":"ParseErrors","details":{"num_errors":2,"errors":[`+
		strings.Repeat(`{"description":"`+strings.Repeat("d", 1000)+`","invalid_text":"`+strings.Repeat("t", 1000)+`","field":"f"},`, 50)+`{}]}}`), nil, asIs)
	if e.Code != codeParseErrors || len(e.Message) > maxMessage+4 || len(e.rows) != maxRowFaults || len(*e.rows[0].InvalidText) > maxFragment+4 {
		t.Errorf("not bounded: %d, %d rows", len(e.Message), len(e.rows))
	}
}

func FuzzErrorBody(f *testing.F) {
	f.Add([]byte(`{"message":"m","error_code":"ParseErrors","details":{"errors":[{"description":"d","field":null,"invalid_text":"\ud83d"}]}}`))
	f.Add([]byte("<html>"))
	f.Fuzz(func(t *testing.T, body []byte) {
		e := &Error{Endpoint: "ingress", Status: 400, Mutates: true}
		e.decodeError(body, []byte(`[{"insert":{"id":1}}]`), asIs)
		if len(e.Message) > maxMessage+len("…") || len(e.rows) > maxRowFaults {
			t.Fatalf("message of %d bytes, %d rows", len(e.Message), len(e.rows))
		}
		if strings.ContainsAny(e.Error(), "\n\r\x1b") {
			t.Fatalf("control characters in %q", e.Error())
		}
		_ = Classify(e)
	})
}

// asIs is for answers that hold no secret.
func asIs(s string) string { return s }
