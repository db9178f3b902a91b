//! Requests of MLflow's REST API, version 2.0.
//!
//! Like MLflow's own clients, it reads the address and the credentials from environment variables.

use std::collections::BTreeMap;
use std::time::Duration;

use reqwest::{Method, StatusCode, redirect};
use serde_json::{Value, json};
use url::{Host, Url};

use super::entries::{TAG_EXPORTED, TAG_TRIAL, TAG_UID};
use crate::cluster::connect::chain;
use crate::failure::Failure;

const ENV_URI: &str = "MLFLOW_TRACKING_URI";
const ENV_USERNAME: &str = "MLFLOW_TRACKING_USERNAME";
const ENV_PASSWORD: &str = "MLFLOW_TRACKING_PASSWORD";
const ENV_TOKEN: &str = "MLFLOW_TRACKING_TOKEN";

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of a request. A server with a slow database stores 1,000 values in seconds.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);
/// Waits between the attempts of a request that the server did not accept.
const WAITS: [Duration; 4] = [
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(4),
];
/// Number of runs per page of a search, the most that every server returns.
const RUNS_PER_PAGE: u32 = 1_000;
/// Path of the request that creates a run.
const CREATE_RUN: &str = "runs/create";
/// Maximum number of characters of a response in an error message.
const RESPONSE_CHARS_MAX: usize = 500;

/// A tracking server.
#[derive(Debug)]
pub(super) struct Client {
    http: reqwest::Client,
    /// Address without credentials, ending with a slash.
    base: Url,
    credentials: Credentials,
}

enum Credentials {
    None,
    Token(String),
    User { name: String, password: Option<String> },
}

/// Shows only the kind: the values are secret.
impl std::fmt::Debug for Credentials {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::None => "None",
            Self::Token(_) => "Token",
            Self::User { .. } => "User",
        })
    }
}

/// A run in MLflow.
#[derive(Debug)]
pub(super) struct RunRef {
    pub(super) id: String,
    /// State of the trial that the run contains, if the copy is complete.
    pub(super) exported: Option<String>,
}

/// A response other than success.
#[derive(Debug)]
struct Refusal {
    status: StatusCode,
    /// MLflow's name of the error, such as `RESOURCE_DOES_NOT_EXIST`.
    code: Option<String>,
    message: String,
}

impl Client {
    /// Creates a client for the server at `uri`, or else at `MLFLOW_TRACKING_URI`.
    pub(super) fn new(uri: Option<&str>) -> Result<Self, Failure> {
        let environment = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        Self::with_environment(uri, &environment)
    }

    fn with_environment(
        uri: Option<&str>,
        environment: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, Failure> {
        let (field, uri) = match (uri, environment(ENV_URI)) {
            (Some(uri), _) => ("--tracking-uri", uri.to_owned()),
            (None, Some(uri)) => (ENV_URI, uri),
            (None, None) => {
                return Err(Failure::Input(format!(
                    "cannot find the MLflow server: --tracking-uri and {ENV_URI} are unset; set \
                     one of them, for example to http://127.0.0.1:5000"
                )));
            }
        };
        let (base, in_url) = parse(field, &uri)?;
        let user = || {
            let (name, password) = (environment(ENV_USERNAME)?, environment(ENV_PASSWORD)?);
            Some(Credentials::User { name, password: Some(password) })
        };
        let token = || environment(ENV_TOKEN).map(Credentials::Token);
        let credentials = in_url.or_else(user).or_else(token).unwrap_or(Credentials::None);
        // A redirected request would send the credentials to another server.
        let builder = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(REQUEST_TIMEOUT)
            .redirect(redirect::Policy::none());
        // A proxy of the environment cannot reach this machine's loopback interface.
        let builder = if is_loopback(&base) { builder.no_proxy() } else { builder };
        let http = builder.build().map_err(|error| {
            Failure::System(format!("cannot create an HTTP client: {}", chain(&error)))
        })?;
        Ok(Self { http, base, credentials })
    }

    /// Returns the address of the page of an experiment.
    pub(super) fn page(&self, experiment_id: &str) -> String {
        format!("{}#/experiments/{experiment_id}", self.base)
    }

    /// Returns the ID of the experiment with this name. Creates it if it does not exist.
    pub(super) async fn experiment(&self, name: &str) -> Result<String, Failure> {
        let what = format!("experiment {name}");
        if let Some(id) = self.find_experiment(name).await? {
            return Ok(id);
        }
        let created = self.post("experiments/create", &json!({ "name": name })).await?;
        let value = match created {
            Ok(value) => value,
            // Another client was faster.
            Err(refusal) if refusal.code.as_deref() == Some("RESOURCE_ALREADY_EXISTS") => {
                let id = self.find_experiment(name).await?;
                return id.ok_or_else(|| self.refused(&what, refusal));
            }
            Err(refusal) => return Err(self.refused(&what, refusal)),
        };
        self.text(&value, "/experiment_id")
    }

    async fn find_experiment(&self, name: &str) -> Result<Option<String>, Failure> {
        let mut url = self.url("experiments/get-by-name")?;
        url.query_pairs_mut().append_pair("experiment_name", name);
        let found = match self.request(Method::GET, url, None).await? {
            Ok(value) => value,
            Err(refusal) if refusal.code.as_deref() == Some("RESOURCE_DOES_NOT_EXIST") => {
                return Ok(None);
            }
            Err(refusal) => return Err(self.refused(&format!("experiment {name}"), refusal)),
        };
        if found["experiment"]["lifecycle_stage"] == "deleted" {
            return Err(Failure::Input(format!(
                "experiment {name} is deleted in MLflow; restore it there, or set --experiment to \
                 another name"
            )));
        }
        self.text(&found, "/experiment/experiment_id").map(Some)
    }

    /// Returns the runs of an experiment that contain trials of the Stoker experiment with this
    /// UID, by trial.
    pub(super) async fn runs(
        &self,
        experiment_id: &str,
        uid: &str,
    ) -> Result<BTreeMap<u32, RunRef>, Failure> {
        let mut runs = BTreeMap::new();
        let mut search = json!({
            "experiment_ids": [experiment_id],
            "filter": format!("tags.`{TAG_UID}` = '{uid}'"),
            "max_results": RUNS_PER_PAGE,
        });
        loop {
            let found = self.post("runs/search", &search).await?;
            let found = found.map_err(|refusal| self.refused("the search for runs", refusal))?;
            for run in found["runs"].as_array().into_iter().flatten() {
                let tag = |name: &str| {
                    let mut tags = run["data"]["tags"].as_array().into_iter().flatten();
                    tags.find(|tag| tag["key"] == name)?["value"].as_str().map(str::to_owned)
                };
                if let Some(index) = tag(TAG_TRIAL).and_then(|index| index.parse().ok()) {
                    let id = self.text(run, "/info/run_id")?;
                    let found = RunRef { id, exported: tag(TAG_EXPORTED) };
                    // After an interrupted request, a trial can have two runs. Prefer the
                    // complete one.
                    match runs.get(&index) {
                        Some(RunRef { exported: Some(_), .. }) => {}
                        Some(_) if found.exported.is_none() => {}
                        _ => drop(runs.insert(index, found)),
                    }
                }
            }
            match found["next_page_token"].as_str() {
                Some(next) if !next.is_empty() => search["page_token"] = next.into(),
                _ => return Ok(runs),
            }
        }
    }

    /// Creates a run, and returns its ID.
    pub(super) async fn create_run(&self, run: &Value) -> Result<String, Failure> {
        let created = self.post(CREATE_RUN, run).await?;
        let created = created.map_err(|refusal| {
            let name = run["run_name"].as_str().unwrap_or_default();
            self.refused(&format!("run {name}"), refusal)
        })?;
        self.text(&created, "/run/info/run_id")
    }

    /// Adds `params`, `metrics` or `tags` to a run.
    pub(super) async fn log(&self, run_id: &str, entries: &Value) -> Result<(), Failure> {
        self.change("runs/log-batch", run_id, entries).await
    }

    /// Changes the status and the end of a run.
    pub(super) async fn update(&self, run_id: &str, state: &Value) -> Result<(), Failure> {
        self.change("runs/update", run_id, state).await
    }

    async fn change(&self, path: &str, run_id: &str, fields: &Value) -> Result<(), Failure> {
        let mut body = fields.clone();
        body["run_id"] = run_id.into();
        let changed = self.post(path, &body).await?;
        changed.map_err(|refusal| self.refused(&format!("run {run_id}"), refusal))?;
        Ok(())
    }

    async fn post(&self, path: &str, body: &Value) -> Result<Result<Value, Refusal>, Failure> {
        self.request(Method::POST, self.url(path)?, Some(body)).await
    }

    /// Sends a request, and again if the server did not process it. A busy server may have
    /// processed it in spite of its response, so a run is not created again: it would exist twice.
    async fn request(
        &self,
        method: Method,
        url: Url,
        body: Option<&Value>,
    ) -> Result<Result<Value, Refusal>, Failure> {
        let mut waits = WAITS.iter();
        loop {
            let mut request = self.http.request(method.clone(), url.clone());
            request = match &self.credentials {
                Credentials::None => request,
                Credentials::Token(token) => request.bearer_auth(token),
                Credentials::User { name, password } => request.basic_auth(name, password.as_ref()),
            };
            if let Some(body) = body {
                request = request.json(body);
            }
            let response = match request.send().await {
                Ok(response) => response,
                Err(error) if error.is_connect() => match waits.next() {
                    Some(wait) => {
                        tokio::time::sleep(*wait).await;
                        continue;
                    }
                    None => return Err(self.unreachable(&error)),
                },
                Err(error) => return Err(self.unreachable(&error)),
            };
            let status = response.status();
            let text = response.text().await.map_err(|error| self.unreachable(&error))?;
            let is_busy = status == StatusCode::TOO_MANY_REQUESTS
                || (status == StatusCode::SERVICE_UNAVAILABLE && !url.path().ends_with(CREATE_RUN));
            if is_busy && let Some(wait) = waits.next() {
                tokio::time::sleep(*wait).await;
                continue;
            }
            return self.read(status, &text);
        }
    }

    fn read(&self, status: StatusCode, text: &str) -> Result<Result<Value, Refusal>, Failure> {
        let value = serde_json::from_str::<Value>(text).ok().filter(Value::is_object);
        match (status.is_success(), value) {
            (true, Some(value)) => Ok(Ok(value)),
            (true, None) => Err(Failure::System(format!(
                "{} is not an MLflow tracking server: its response is not a JSON object; check \
                 --tracking-uri",
                self.base
            ))),
            (false, value) => {
                let of = |name: &str| Some(value.as_ref()?[name].as_str()?.to_owned());
                let message = of("message").unwrap_or_else(|| text.trim().to_owned());
                let message = message.chars().take(RESPONSE_CHARS_MAX).collect();
                Ok(Err(Refusal { status, code: of("error_code"), message }))
            }
        }
    }

    fn url(&self, path: &str) -> Result<Url, Failure> {
        self.base
            .join(&format!("api/2.0/mlflow/{path}"))
            .map_err(|error| Failure::Input(format!("invalid tracking URL {}: {error}", self.base)))
    }

    fn text(&self, value: &Value, pointer: &str) -> Result<String, Failure> {
        let text = value.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
        text.ok_or_else(|| {
            Failure::System(format!(
                "the response of {} lacks `{}`; check --tracking-uri",
                self.base,
                pointer.trim_start_matches('/').replace('/', ".")
            ))
        })
    }

    fn unreachable(&self, error: &reqwest::Error) -> Failure {
        let (base, chain) = (&self.base, chain(error));
        let remedy = match error.is_connect() {
            true => "; start it, for example with `mlflow server`, or check --tracking-uri",
            false => "",
        };
        Failure::System(format!("cannot reach the MLflow server at {base}: {chain}{remedy}"))
    }

    fn refused(&self, what: &str, refusal: Refusal) -> Failure {
        let Refusal { status, code, message } = refusal;
        let remedy = match (status, code) {
            (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _) => {
                format!("; set {ENV_TOKEN}, or {ENV_USERNAME} and {ENV_PASSWORD}")
            }
            (_, None) => "; check --tracking-uri".to_owned(),
            (_, Some(_)) => String::new(),
        };
        let server = &self.base;
        let separator = if message.is_empty() { "" } else { ": " };
        Failure::System(format!(
            "MLflow at {server} refused {what} with {status}{separator}{message}{remedy}"
        ))
    }
}

fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Domain(name)) => name == "localhost",
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.is_loopback(),
        None => false,
    }
}

/// Parses the address of a server, and separates the credentials: messages contain the address.
fn parse(field: &str, uri: &str) -> Result<(Url, Option<Credentials>), Failure> {
    let invalid = |why: &str| {
        Failure::Input(format!(
            "{field} {why}; it must be the URL of a tracking server, such as \
             http://127.0.0.1:5000, which `mlflow server` starts"
        ))
    };
    let mut url = Url::parse(uri).map_err(|error| invalid(&format!("is not a URL: {error}")))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(invalid(&format!("has the scheme {}:", url.scheme())));
    }
    let decoded =
        |text: &str| percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned();
    let credentials = (!url.username().is_empty()).then(|| Credentials::User {
        name: decoded(url.username()),
        password: url.password().map(decoded),
    });
    // Both fail only for URLs without a host, which http URLs have.
    let _ = (url.set_username(""), url.set_password(None));
    url.set_query(None);
    url.set_fragment(None);
    if !url.path().ends_with('/') {
        url.set_path(&format!("{}/", url.path()));
    }
    Ok((url, credentials))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;
    use std::thread::JoinHandle;

    use super::*;

    fn client(uri: Option<&str>, variables: &[(&str, &str)]) -> Result<Client, String> {
        let environment = |name: &str| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        Client::with_environment(uri, &environment).map_err(|failure| failure.to_string())
    }

    #[test]
    fn addresses_come_from_the_flag_or_the_environment() {
        let base = |uri, variables: &[_]| client(uri, variables).map(|client| client.page("7"));
        let check = |made: Result<String, String>, expected: &str| match made {
            Ok(page) => assert_eq!(page, expected),
            Err(error) => assert!(error.contains(expected), "{error}"),
        };
        let variable = [(ENV_URI, "https://b.example/ml/")];
        check(base(Some("http://a:5000"), &variable), "http://a:5000/#/experiments/7");
        check(base(None, &variable), "https://b.example/ml/#/experiments/7");
        check(base(None, &[]), "--tracking-uri and MLFLOW_TRACKING_URI are unset; set");
        check(base(Some("sqlite:///mlflow.db"), &[]), "--tracking-uri has the scheme sqlite:");
        check(base(None, &[(ENV_URI, "mlruns")]), "MLFLOW_TRACKING_URI is not a URL");
    }

    #[test]
    fn messages_do_not_contain_credentials() {
        let check = |uri, variables: &[(&str, &str)], expected: &str| {
            let client = client(Some(uri), variables).unwrap();
            let found = match &client.credentials {
                Credentials::None => String::new(),
                Credentials::Token(token) => format!("token {token}"),
                Credentials::User { name, password } => format!("{name} {password:?}"),
            };
            assert_eq!(found, expected);
            let debug = format!("{client:?} {}", client.page("1"));
            assert!(!debug.contains("s3cret"), "{debug}");
        };
        let token = (ENV_TOKEN, "s3cret");
        check("http://ann:s3cret%21@a", &[token], "ann Some(\"s3cret!\")");
        check(
            "http://a",
            &[token, (ENV_USERNAME, "ann"), (ENV_PASSWORD, "s3cret")],
            "ann Some(\"s3cret\")",
        );
        check("http://a", &[token], "token s3cret");
        // Like MLflow's clients, a name without a password is ignored.
        check("http://a", &[token, (ENV_USERNAME, "ann")], "token s3cret");
        check("http://a", &[], "");
        let error = client(Some("ftp://ann:s3cret@a"), &[]).unwrap_err();
        assert!(error.contains("has the scheme ftp:") && !error.contains("s3cret"), "{error}");
        let refusal = Refusal { status: StatusCode::FORBIDDEN, code: None, message: String::new() };
        let error = client(Some("http://ann:s3cret@a"), &[]).unwrap().refused("run 1", refusal);
        assert!(!error.to_string().contains("s3cret"), "{error}");
    }

    const BUSY: (&str, &str) = ("503 Service Unavailable", "");

    /// Starts a server that gives these responses, each with a status and a body, and then ends.
    fn serve(responses: &'static [(&str, &str)]) -> (Client, JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            for (status, body) in responses {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = Vec::new();
                while !request.ends_with(b"}") {
                    let mut part = [0; 512];
                    let length = stream.read(&mut part).unwrap();
                    assert!(length > 0, "the request ends early");
                    request.extend(&part[..length]);
                }
                let length = body.len();
                let head = format!("HTTP/1.1 {status}\r\nconnection: close\r\n");
                write!(stream, "{head}content-length: {length}\r\n\r\n{body}").unwrap();
            }
        });
        (client(Some(&url), &[]).unwrap(), server)
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(future)
    }

    #[test]
    fn server_that_is_not_started_has_a_remedy() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        drop(listener);
        let client = client(Some(&url), &[]).unwrap();
        let error = block_on(async { client.http.get(&url).send().await }).unwrap_err();
        let text = client.unreachable(&error).to_string();
        assert!(text.contains("; start it, for example with `mlflow server`"), "{text}");
    }

    #[test]
    fn busy_servers_are_asked_again() {
        let (client, server) = serve(&[BUSY, ("200 OK", "{}")]);
        block_on(client.update("7", &json!({ "status": "RUNNING" }))).unwrap();
        server.join().unwrap();
    }

    #[test]
    fn busy_servers_create_no_second_run() {
        let (client, server) = serve(&[BUSY]);
        let error = block_on(client.create_run(&json!({ "run_name": "a-1" }))).unwrap_err();
        assert!(error.to_string().contains("refused run a-1 with 503"), "{error}");
        server.join().unwrap();
    }

    #[test]
    fn refusals_have_the_words_of_the_server() {
        let client = client(Some("http://a"), &[]).unwrap();
        let check = |status, text: &str, expected: &str| {
            let message = match client.read(status, text) {
                Ok(Ok(value)) => value.to_string(),
                Ok(Err(refusal)) => client.refused("run 1", refusal).to_string(),
                Err(failure) => failure.to_string(),
            };
            assert_eq!(message, expected);
        };
        check(StatusCode::OK, "{}", "{}");
        check(
            StatusCode::OK,
            "<html>",
            "http://a/ is not an MLflow tracking server: its response is not a JSON object; check \
             --tracking-uri",
        );
        check(
            StatusCode::BAD_REQUEST,
            r#"{"error_code": "INVALID_PARAMETER_VALUE", "message": "too long"}"#,
            "MLflow at http://a/ refused run 1 with 400 Bad Request: too long",
        );
        check(
            StatusCode::UNAUTHORIZED,
            "",
            "MLflow at http://a/ refused run 1 with 401 Unauthorized; set MLFLOW_TRACKING_TOKEN, \
             or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        );
        check(
            StatusCode::NOT_FOUND,
            "no page",
            "MLflow at http://a/ refused run 1 with 404 Not Found: no page; check --tracking-uri",
        );
    }
}
