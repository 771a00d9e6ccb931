package config

// connection checks what the settings of the connection to the brokers say
// together.
func (c *KafkaSink) connection(r *reading) {
	for _, s := range []struct {
		name  string
		value string
	}{
		{"KAFKASINK_CA_FILE", c.CAFile},
		{"KAFKASINK_CLIENT_CERT_FILE", c.ClientCertFile},
		{"KAFKASINK_SERVER_NAME", c.ServerName},
	} {
		r.require(s.value == "" || c.TLS, s.name, "is set although KAFKASINK_TLS is false",
			"only together with KAFKASINK_TLS=true", "KAFKASINK_TLS")
	}
	r.require((c.ClientCertFile == "") == (c.ClientKeyFile == ""), "KAFKASINK_CLIENT_CERT_FILE",
		"and KAFKASINK_CLIENT_KEY_FILE are a pair, and one of them is not set", "both, or neither", "KAFKASINK_CLIENT_KEY_FILE")

	login, user, password, token := c.SASLMechanism != "", c.SASLUser != "", c.SASLPassword.IsSet(), c.SASLToken.IsSet()
	if !login {
		r.require(!user && !password, "KAFKASINK_SASL_MECHANISM",
			"is not set although KAFKASINK_SASL_USER or KAFKASINK_SASL_PASSWORD is", mechanisms, "KAFKASINK_SASL_USER", "KAFKASINK_SASL_PASSWORD")
		r.require(!token && c.SASLTokenURL == "", "KAFKASINK_SASL_MECHANISM",
			"is not set although KAFKASINK_SASL_TOKEN or KAFKASINK_SASL_TOKEN_URL is", mechanisms, "KAFKASINK_SASL_TOKEN", "KAFKASINK_SASL_TOKEN_URL")
		return
	}
	oauth := c.SASLMechanism == SASLOAuthBearer
	r.require(oauth || c.SASLTokenURL == "", "KAFKASINK_SASL_TOKEN_URL", "is set although KAFKASINK_SASL_MECHANISM is not oauthbearer",
		"only together with oauthbearer", "KAFKASINK_SASL_MECHANISM")
	r.require(oauth || c.SASLMechanism == SASLAWSMSKIAM || !token, "KAFKASINK_SASL_TOKEN", "is set although KAFKASINK_SASL_MECHANISM has no use for it",
		"only together with oauthbearer or aws-msk-iam", "KAFKASINK_SASL_MECHANISM")
	if oauth {
		r.require(token != (c.SASLTokenURL != ""), "KAFKASINK_SASL_TOKEN", "or KAFKASINK_SASL_TOKEN_URL is what oauthbearer takes, and not exactly one of them is set",
			"a token, or the URL to fetch one from", "KAFKASINK_SASL_MECHANISM", "KAFKASINK_SASL_TOKEN_URL")
		if token || c.SASLTokenURL == "" {
			return
		}
	}
	r.require(user, "KAFKASINK_SASL_USER", "is not set although KAFKASINK_SASL_MECHANISM is",
		"a user name", "KAFKASINK_SASL_MECHANISM")
	r.require(password, "KAFKASINK_SASL_PASSWORD", "is not set although KAFKASINK_SASL_MECHANISM is",
		"a password, here or in the file that KAFKASINK_SASL_PASSWORD_FILE names", "KAFKASINK_SASL_MECHANISM")
}

const mechanisms = "plain, scram-sha-256, scram-sha-512, oauthbearer or aws-msk-iam"
