package feldera

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"holdfast/internal/decode"
)

// Class says what an error of the pipeline's HTTP interface asks for.
type Class uint8

// The classes. The zero value is invalid, so that a forgotten class shows.
const (
	// ClassRetry: nothing was applied, and trying again may work.
	ClassRetry Class = iota + 1
	// ClassRetryUncertain: the request may have been applied, or may be applied
	// still. It must not be sent again before that has been settled.
	ClassRetryUncertain
	// ClassRefuseRecord: the pipeline refused the rows, and nothing was applied.
	ClassRefuseRecord
	// ClassStopOperator: trying again cannot work until a person has acted.
	ClassStopOperator
	// ClassOtherIncarnation: the pipeline process is no longer the one that gave
	// the token. What it had accepted may be lost.
	ClassOtherIncarnation
)

// String gives the name used in logs and as a metric's outcome.
func (c Class) String() string {
	switch c {
	case ClassRetry:
		return "retry"
	case ClassRetryUncertain:
		return "uncertain"
	case ClassRefuseRecord:
		return "refused"
	case ClassStopOperator:
		return "operator"
	case ClassOtherIncarnation:
		return "incarnation"
	}
	return fmt.Sprintf("class(%d)", uint8(c))
}

// The pipeline's and the manager's error codes that are told apart. Matching
// on them is confined to this file and to the answers of transactions.
const (
	codeParseErrors           = "ParseErrors"
	codeNoTransaction         = "NoTransactionInProgress"
	codeTransactionInProgress = "TransactionInProgress"
	codeIncarnationMismatch   = "IncarnationUuidMismatch"
	codePipelineRestarted     = "PipelineRestarted"
	codeUnknownTokenEndpoint  = "UnknownEndpointInCompletionToken"
	codeTerminating           = "Terminating"
	codeEnterprise            = "EnterpriseFeature"
	codeUnreachable           = "PipelineInteractionUnreachable"
	codeUnknownTable          = "ConfigError.UnknownInputStream"
	codeUnknownPipeline       = "UnknownPipelineName"
	codeInvalidParam          = "InvalidParam"
)

// byManager holds the 503 codes with which the manager says that it has not
// passed a request on.
var byManager = map[string]bool{
	"PipelineInteractionNotDeployed": true,
	"PipelineUnavailable":            true,
}

// notApplied holds the 503 codes that are given before a request's body can
// have been used: they need no settling.
var notApplied = map[string]bool{
	"Initializing":                   true,
	"AwaitingApproval":               true,
	"Suspended":                      true,
	"RestoreInProgress":              true,
	"BootstrapInProgress":            true,
	"PipelineInteractionNotDeployed": true,
	"PipelineUnavailable":            true,
}

// Error is one failed exchange with the pipeline or its manager.
type Error struct {
	// Endpoint is the kind of request: one of the closed set of endpoint names
	// that [Config.Observe] gets.
	Endpoint string
	// Status is the HTTP status, 0 where no answer came.
	Status int
	// Code is the server's error_code, "" where it gave none.
	Code string
	// Message is the server's message, bounded and without control characters.
	Message string
	// Mutates is true for requests that change something at the destination.
	Mutates bool
	// Sent is false only when it is certain that no byte of the request left.
	Sent bool
	// RetryAfter is how long the server asked to wait, 0 where it did not.
	RetryAfter time.Duration
	// Err is the cause: what the transport or the reading of the answer said.
	Err error

	// rows are the first parse errors of an ingress answer, bounded, and blame
	// says whose bytes all of them are about.
	rows  []rowFault
	blame blame
}

// rowFault is one entry of details.errors in a ParseErrors answer.
type rowFault struct {
	Description string  `json:"description"`
	Field       *string `json:"field"`
	InvalidText *string `json:"invalid_text"`
}

// Error names the request, the answer and the cause.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.Endpoint)
	if e.Status != 0 {
		fmt.Fprintf(&b, ": HTTP %d", e.Status)
		if e.Code != "" {
			b.WriteString(" " + e.Code)
		}
	}
	if e.Message != "" {
		b.WriteString(": " + e.Message)
	}
	if e.Err != nil {
		fmt.Fprintf(&b, ": %v", e.Err)
	}
	return b.String()
}

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.Err }

// Classify says what to do about err. It is the only place that decides it;
// transactions alone look at two codes first, because the manager's own
// repetition of a request makes them ambiguous.
//
// Errors that this package did not make count as ClassRetry: they say nothing about
// the destination.
func Classify(err error) Class {
	var changed *IncarnationChanged
	if errors.As(err, &changed) {
		return ClassOtherIncarnation
	}
	var refused *decode.Refusal
	if errors.As(err, &refused) {
		if refused.Reason == decode.ReasonRejected || refused.Reason == decode.ReasonValue {
			return ClassRefuseRecord
		}
		return ClassStopOperator
	}
	var e *Error
	if !errors.As(err, &e) {
		return ClassRetry
	}
	if e.Status == 0 {
		return e.classifyUnanswered()
	}
	return e.classifyAnswered()
}

func (e *Error) classifyUnanswered() Class {
	var cert *tls.CertificateVerificationError
	if errors.As(e.Err, &cert) {
		return ClassStopOperator
	}
	return e.open(e.Sent)
}

func (e *Error) classifyAnswered() Class {
	switch e.Code {
	case codeParseErrors:
		return ClassRefuseRecord
	case codePipelineRestarted, codeUnknownTokenEndpoint, codeIncarnationMismatch:
		return ClassOtherIncarnation
	case codeNoTransaction:
		// The manager sends a commit twice when the first answer was lost: this
		// can mean that the first one worked.
		return ClassRetryUncertain
	case codeTransactionInProgress:
		return ClassRetry
	case codeTerminating:
		// The process may have taken the body before it began to end.
		return e.open(true)
	case codeEnterprise:
		return ClassStopOperator
	}
	switch {
	case e.Code == "" && e.Err != nil && (e.Status == http.StatusBadRequest || e.Status == http.StatusGone) && !errors.Is(e.Err, errTooLarge):
		// The answer broke off before its code, and these two can mean
		// anything from a refused row to a process that is ending.
		return e.open(true)
	case e.Status < 300:
		// A success whose body is not what was promised: applied, most likely,
		// but the token is lost.
		return e.open(true)
	case e.Status < 400:
		return ClassStopOperator // a redirect: the address is not the pipeline's
	case e.Status == http.StatusRequestTimeout:
		return e.open(true)
	case e.Status == http.StatusConflict || e.Status == http.StatusTooManyRequests:
		return ClassRetry
	case e.Status == http.StatusNotImplemented:
		return ClassStopOperator
	case e.Status < 500:
		return ClassStopOperator
	case byManager[e.Code] && (e.Endpoint == epStart || e.Endpoint == epCommit):
		// It speaks of the manager's own second attempt. The first one can have
		// worked, and its answer be lost with a pipeline too busy to be seen.
		return e.open(true)
	case e.Status == http.StatusServiceUnavailable && notApplied[e.Code]:
		return ClassRetry
	}
	return e.open(true)
}

// open is ClassRetry for what may be repeated freely and ClassRetryUncertain for a
// request that could have changed something.
func (e *Error) open(sent bool) Class {
	if e.Mutates && sent {
		return ClassRetryUncertain
	}
	return ClassRetry
}

// IncarnationChanged is the event that the pipeline process is not the one
// that the expected tokens came from. It is never retried: the owner decides
// by the progress table what was lost.
type IncarnationChanged struct {
	// Was is the expected incarnation, Now the present one. Now is "" where
	// only the end of the old one is known.
	Was, Now string
}

// Error names both incarnations.
func (e *IncarnationChanged) Error() string {
	now := e.Now
	if now == "" {
		now = "another one"
	}
	return fmt.Sprintf("the pipeline's incarnation changed from %s to %s: accepted rows may be lost", e.Was, now)
}

// errorBody is the shape that both servers give to errors.
type errorBody struct {
	Message   string `json:"message"`
	ErrorCode string `json:"error_code"`
	Details   struct {
		NumErrors int        `json:"num_errors"`
		Errors    []rowFault `json:"errors"`
	} `json:"details"`
}

// tolerant reads error answers only: a fragment of a refused row in them may be
// anything, and must not hide the code before it.
var tolerant = json.JoinOptions(jsontext.AllowInvalidUTF8(true), jsontext.AllowDuplicateNames(true))

const (
	// maxMessage bounds a server's message in errors and logs, in bytes.
	maxMessage = 500
	// maxUnread bounds what is looked at of an answer that is not understood:
	// more than maxMessage, so that no secret is cut in two before it is found.
	maxUnread = maxMessage + maxKeyBytes
	// maxFragment bounds the fragment of a refused row in an error, in bytes.
	maxFragment = 200
	// maxRowFaults is how many parse errors of one answer are kept.
	maxRowFaults = 8
)

// decodeError fills e from an error answer's body, whatever that is: JSON of
// the servers, HTML of a proxy, or noise. sent is the request's body. clean
// takes secrets out of a text; it comes before the cutting, which could leave
// half of one.
func (e *Error) decodeError(body, sent []byte, clean func(string) string) {
	var b errorBody
	if err := json.Unmarshal(body, &b, tolerant); err != nil {
		// details differ by error and are not to be relied on: what stands
		// before them is, and is enough to classify.
		var head struct {
			Message   string `json:"message"`
			ErrorCode string `json:"error_code"`
		}
		if json.Unmarshal(body, &head, tolerant) != nil {
			e.Message = clip("answer is not the server's JSON: "+clean(string(body[:min(len(body), maxUnread)])), maxMessage)
			return
		}
		b.Message, b.ErrorCode = head.Message, head.ErrorCode
	}
	e.Message, e.Code = clip(clean(b.Message), maxMessage), clip(clean(b.ErrorCode), 100)
	e.blame = blamed(sent, b.Details.NumErrors, b.Details.Errors)
	for _, row := range b.Details.Errors[:min(len(b.Details.Errors), maxRowFaults)] {
		row.Description = clip(clean(row.Description), maxMessage)
		if row.InvalidText != nil {
			text := clip(clean(*row.InvalidText), maxFragment)
			row.InvalidText = &text
		}
		if row.Field != nil {
			field := clip(clean(*row.Field), 100)
			row.Field = &field
		}
		e.rows = append(e.rows, row)
	}
}

// clip bounds text from outside and makes it safe for one line of a log.
func clip(s string, limit int) string {
	cut := len(s) > limit
	if cut {
		s = s[:limit]
	}
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
	if cut {
		s += "…"
	}
	return s
}

// refusal turns an error of class ClassStopOperator into the message for the
// person who has to act.
func (e *Error) refusal(c *Client) *decode.Refusal {
	r := &decode.Refusal{
		Reason: decode.ReasonSetup, What: "request " + e.Endpoint, Where: c.where(),
		Why: "the destination will not take it", Err: e,
	}
	switch {
	case e.Status == http.StatusUnauthorized:
		r.Why, r.Expected = "the API key is not accepted", "a valid key of the form apikey:…"
		r.Do = "set a valid API key; a key file is read again on the next attempt"
	case e.Status == http.StatusForbidden:
		r.Why, r.Expected = "the API key's role does not allow it", "a key with the role Write"
		r.Do = "give the key the role Write"
	case e.Code == codeUnknownPipeline:
		r.Why = "there is no such pipeline"
		r.Do = "create the pipeline (for tables of Postgres, run: pgsource feldera-sql -apply), or correct its name in FELDERA_PIPELINE"
	case e.Code == codeUnknownTable:
		r.Reason, r.Why = decode.ReasonSchema, "the program has no such table"
		r.Do = "add the table to the pipeline's program"
	case e.Code == codeEnterprise:
		r.Reason, r.Why = decode.ReasonUnsupported, "this build of Feldera does not have the feature"
		r.Do = "acknowledge on completed instead of durable, or use a build with checkpoints"
	case e.Status == 0:
		r.Why, r.Expected = "the server's certificate is not trusted", "a certificate of a known authority for this host name"
		r.Do = "give the authority's certificate as CA file"
	case e.Status == http.StatusRequestEntityTooLarge:
		r.Reason, r.Why = decode.ReasonLimit, "a server on the way limits the size of requests"
		r.Do = "lower the batch size, or raise that server's limit"
	case e.Status == http.StatusNotFound:
		r.Why = "the address answers, but has no such resource"
		r.Do = "check the address: with a pipeline name it is the manager's, without one the pipeline process's"
	case e.Status >= 300 && e.Status < 400:
		r.Why = "the address redirects elsewhere"
		r.Do = "use the final address"
	}
	return r
}
