package core

import (
	"encoding/json"
	"fmt"
	"net/http"
)

// APIError is an error answer of the engine or of the manager, exactly as it
// goes over the wire.
type APIError struct {
	Status  int    `json:"-"`
	Message string `json:"message"`
	Code    string `json:"error_code"`
	// Details is any JSON; nil is written as null.
	Details any `json:"details"`
	// Abort means that the engine's thread died instead of answering: the
	// connection is cut.
	Abort bool `json:"-"`
}

// Error gives the code and the message.
func (e *APIError) Error() string { return fmt.Sprintf("%d %s: %s", e.Status, e.Code, e.Message) }

// JSON is the body of the answer.
func (e *APIError) JSON() []byte {
	b, err := json.Marshal(e)
	if err != nil {
		return []byte(`{"message":"error answer cannot be encoded","error_code":"Internal","details":null}`)
	}
	return b
}

func errUnknownTable(endpoint, table string) *APIError {
	return &APIError{
		Status: http.StatusNotFound, Code: "ConfigError.UnknownInputStream",
		Message: fmt.Sprintf("invalid controller configuration: Input endpoint '%s' specifies unknown table '%s'", endpoint, table),
		Details: map[string]any{"config_error": map[string]string{"endpoint_name": endpoint, "stream_name": table}},
	}
}

func errParserConfig(endpoint, why, config string) *APIError {
	return &APIError{
		Status: http.StatusBadRequest, Code: "ConfigError.ParserConfigParseError",
		Message: fmt.Sprintf("invalid controller configuration: Error parsing format configuration for input endpoint '%s': %s\nInvalid configuration: %s", endpoint, why, config),
		Details: map[string]any{"config_error": map[string]string{"endpoint_name": endpoint, "error": why, "config": config}},
	}
}

func errFormatNotSupported(endpoint, why string) *APIError {
	return &APIError{
		Status: http.StatusBadRequest, Code: "ConfigError.InputFormatNotSupported",
		Message: fmt.Sprintf("invalid controller configuration: Format not supported on input endpoint '%s': %s", endpoint, why),
		Details: map[string]any{"config_error": map[string]string{"endpoint_name": endpoint, "error": why}},
	}
}

func errUnknownFormat(endpoint, format string) *APIError {
	return &APIError{
		Status: http.StatusBadRequest, Code: "ConfigError.UnknownInputFormat",
		Message: fmt.Sprintf("invalid controller configuration: Input endpoint '%s' specifies unknown input format '%s'", endpoint, format),
		Details: map[string]any{"config_error": map[string]string{"endpoint_name": endpoint, "format_name": format}},
	}
}

// ErrConnectionLimit is the answer to the 101st HTTP endpoint.
func ErrConnectionLimit() *APIError {
	return &APIError{
		Status: http.StatusTooManyRequests, Code: "ApiConnectionLimit",
		Message: "The API connections limit has been exceded. Close some of the existing connections before opening new ones.",
	}
}

func errInvalidParam(why string) *APIError {
	return &APIError{
		Status: http.StatusBadRequest, Code: "InvalidParam",
		Message: "Invalid parameter: " + why, Details: map[string]string{"error": why},
	}
}

func errRestarted(was, now string) *APIError {
	text := fmt.Sprintf("Completion token was created by a previous incarnation of the pipeline (incarnation uuid: %s) and is not valid for the current incarnation (%s). "+
		"This indicates that the pipeline was suspended and resumed from a checkpoint or restarted after a failure.", was, now)
	return &APIError{
		Status: http.StatusGone, Code: "PipelineRestarted", Message: text,
		Details: map[string]string{"error": text},
	}
}

func errUnknownEndpointID(id uint64) *APIError {
	return &APIError{
		Status: http.StatusGone, Code: "UnknownEndpointInCompletionToken",
		Message: fmt.Sprintf("completion token specifies input endpoint id %d, which doesn't exist; this indicates that the endpoint was deleted after the token was generated", id),
		Details: map[string]uint64{"endpoint_id": id},
	}
}

func errUnknownEndpoint(name string) *APIError {
	return &APIError{
		Status: http.StatusNotFound, Code: "UnknownInputEndpoint",
		Message: fmt.Sprintf("unknown input endpoint name '%s'", name), Details: map[string]string{"endpoint_name": name},
	}
}

func errTransactionInProgress() *APIError {
	return &APIError{
		Status: http.StatusConflict, Code: "TransactionInProgress",
		Message: "Cannot perform this operation while there is a transaction in progress", Details: struct{}{},
	}
}

func errNoTransaction() *APIError {
	return &APIError{
		Status: http.StatusBadRequest, Code: "NoTransactionInProgress",
		Message: "This operation requires an active transaction, but none is currently in progress", Details: struct{}{},
	}
}

func errIncarnationMismatch(requested, expected string) *APIError {
	return &APIError{
		Status: http.StatusBadRequest, Code: "IncarnationUuidMismatch",
		Message: fmt.Sprintf("Incarnation UUID mismatch (%s in request, expected %s)", requested, expected),
		Details: struct {
			Requested string `json:"requested"`
			Expected  string `json:"expected"`
		}{requested, expected},
	}
}

// errState is the answer while the process is not ready; state is one of the
// codes of contract §1.4.
func errState(state State) *APIError {
	switch state {
	case StateInitializing:
		return &APIError{Status: http.StatusServiceUnavailable, Code: "Initializing", Message: "Operation failed because the pipeline has not finished initializing."}
	case StateSuspended:
		return &APIError{Status: http.StatusServiceUnavailable, Code: "Suspended", Message: "Operation failed because the pipeline has been suspended."}
	case StateRestoring:
		return &APIError{Status: http.StatusServiceUnavailable, Code: "RestoreInProgress", Message: "Operation cannot be initiated now because the pipeline is being restored from a checkpoint.", Details: struct{}{}}
	case StateBootstrapping:
		return &APIError{Status: http.StatusServiceUnavailable, Code: "BootstrapInProgress", Message: "Operation cannot be initiated now because the pipeline is bootstrapping new or modified views.", Details: struct{}{}}
	case StateTerminating:
		return &APIError{Status: http.StatusGone, Code: "Terminating", Message: "Operation failed because the pipeline is shutting down."}
	case StateFailed:
		return &APIError{Status: http.StatusInternalServerError, Code: "DbspPanic", Message: "Panic inside the DBSP runtime.", Details: struct{}{}}
	case StateRunning, StatePaused:
		return nil
	}
	return &APIError{Status: http.StatusInternalServerError, Code: "ControllerExit", Message: "unknown state " + string(state)}
}

// ErrQuery is the answer to an ad-hoc query that failed before its first row.
func ErrQuery(why string) *APIError {
	return &APIError{
		Status: http.StatusBadRequest, Code: "AdHocQueryError",
		Message: "Error during query processing: " + why + ".", Details: map[string]string{"error": why},
	}
}
