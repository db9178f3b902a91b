//! Protocol between a runner and an external searcher: questions, answers and URLs.
//!
//! ```text
//!   Question { call, events, ... }  ->  Answer { call, actions }
//! ```
//!
//! A question contains the events since the question before it. A lost answer is asked for again
//! with the same `call`.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::trial::CloseCause;

/// Version of the protocol.
pub const PROTOCOL_VERSION: u32 = 1;

/// Maximum size of an answer, in bytes.
pub const ANSWER_BYTES_MAX: usize = 1 << 20;

/// Maximum size of the actions of an answer as JSON, in bytes. The experiment records them.
pub const ACTIONS_BYTES_MAX: usize = 64 << 10;

/// Maximum size of a tag, in bytes.
pub const TAG_BYTES_MAX: usize = 128;

/// Time within which an answer must arrive, in seconds.
pub const ANSWER_SECONDS_MAX: u64 = 30;

/// A question to an external searcher.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Question {
    /// [`PROTOCOL_VERSION`].
    pub version: u32,
    /// Name of the experiment and the first 8 characters of its UID: `mnist-0b3f9c1e`.
    pub experiment: String,
    /// Number of the question, from 0.
    pub call: u64,
    /// Space, metric and limits of the search.
    pub spec: QuestionSpec,
    /// Events since the question before this one, in order.
    pub events: Vec<OrderedEvent>,
    /// All earlier events and answers, in order. Only in the first question to a program that was
    /// just started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub history: Option<Vec<HistoryEntry>>,
}

/// Parts of an experiment's spec that a searcher needs.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct QuestionSpec {
    /// `spec.searcher`, with all defaults.
    pub searcher: Value,
    /// `spec.hyperparameters`.
    pub hyperparameters: Value,
}

/// An event with its position.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct OrderedEvent {
    /// Position of the event in the order of the experiment. Rises, with gaps. Several deletions
    /// may share one.
    pub order: u64,
    /// The event.
    #[serde(flatten)]
    pub event: SearchEvent,
}

/// An event of a search.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum SearchEvent {
    /// The search began.
    Began(NoFields),
    /// A trial has trained to the length that it was granted.
    Result(ResultEvent),
    /// A trial has ended by itself or by the user.
    Closed(ClosedEvent),
    /// The user deleted a trial.
    Deleted(TrialEvent),
    /// The user edited the search. A search that had ended continues.
    Edited(EditEvent),
    /// A limit of the search was reached, and all open trials were stopped. The searcher gets this
    /// event only if the user continues the search.
    LimitReached(NoFields),
}

/// An object without fields.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct NoFields {}

/// Result of a trial.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResultEvent {
    /// Index of the trial.
    pub trial: u32,
    /// Tag of the trial.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// Length that the trial has trained, in the unit of `maxLength`.
    pub units: u64,
    /// Searched metric; null for NaN, and for the infinity that is worst.
    pub metric: Option<f64>,
    /// Values of the objectives after the first one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub values: Vec<Option<f64>>,
}

/// End of a trial.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClosedEvent {
    /// Index of the trial.
    pub trial: u32,
    /// Tag of the trial.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// Cause of the end.
    pub cause: CloseCause,
}

/// An event about a trial.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TrialEvent {
    /// Index of the trial.
    pub trial: u32,
}

/// New numbers of a search.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EditEvent {
    /// Maximum number of trials.
    pub max_trials: u32,
    /// Maximum number of trials that train concurrently; 0 means no limit.
    pub max_concurrent_trials: u32,
    /// Full length of a trial, in its unit.
    pub max_length: u64,
}

/// An earlier event, or an earlier answer.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(untagged)]
pub enum HistoryEntry {
    /// Actions of an answer.
    Answer {
        /// Position of the answer in the order of the experiment.
        order: u64,
        /// Its actions, as far as they had effects. Creations have their `trial`.
        actions: Vec<Action>,
    },
    /// An event.
    Event(OrderedEvent),
}

/// Answer of an external searcher.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Answer {
    /// `call` of the question.
    pub call: u64,
    /// Decisions, in order.
    pub actions: Vec<Action>,
}

/// A decision of an external searcher.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum Action {
    /// Creates a trial.
    Create(CreateAction),
    /// Continues a trial that has a result to a greater length.
    Continue(ContinueAction),
    /// Pauses a trial that has a result: it releases its slots.
    Pause(TrialAction),
    /// Stops a trial for good.
    Stop(TrialAction),
    /// Stops all open trials and ends the search. The last action.
    Finish(NoFields),
}

/// Creation of a trial.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CreateAction {
    /// Index of the trial. Always the next index; may be left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trial: Option<u32>,
    /// Hyperparameters, in the space of the experiment. Unset: the experiment's sampler draws them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "crd", schemars(schema_with = "crate::experiment::schema::free_object"))]
    pub hyperparameters: Option<Value>,
    /// Length that the trial trains at first. Unset: `maxLength`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub units: Option<u64>,
    /// Name of the trial for the searcher. All events of the trial repeat it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

/// A trial, and its new length.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContinueAction {
    /// Index of the trial.
    pub trial: u32,
    /// New length, at most `maxLength`.
    pub units: u64,
}

/// A trial.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TrialAction {
    /// Index of the trial.
    pub trial: u32,
}

/// Host of an external searcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SearcherHost {
    /// A Service in the namespace of the experiment.
    Service(String),
    /// This machine: `localhost`, `127.0.0.1` or `::1`.
    Loopback(String),
}

impl SearcherHost {
    /// Returns the name to connect to: `SERVICE.NAMESPACE.svc`, or the loopback address itself.
    pub fn name_in(&self, namespace: &str) -> String {
        match self {
            Self::Service(service) => format!("{service}.{namespace}.svc"),
            Self::Loopback(address) => address.clone(),
        }
    }
}

/// URL of an external searcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SearcherUrl {
    /// Host.
    pub host: SearcherHost,
    /// Port; 80 if the URL has none.
    pub port: u16,
    /// Path with its query; at least `/`.
    pub path: String,
}

impl SearcherUrl {
    /// Parses `http://HOST[:PORT][/PATH]`. A host is the plain name of a Service or this machine.
    ///
    /// # Errors
    ///
    /// The violated rule, to follow the path of the field.
    pub fn parse(url: &str) -> Result<Self, &'static str> {
        const FORM: &str = "must be http://SERVICE[:PORT][/PATH] with the name of a Service of the \
                            experiment's namespace, or http://127.0.0.1[:PORT][/PATH]";
        let rest = url.strip_prefix("http://").ok_or(FORM)?;
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        // The address of IPv6 has colons.
        let host_end = match authority.find(']') {
            Some(end) => end + 1,
            None => authority.find(':').unwrap_or(authority.len()),
        };
        let (host, port) = authority.split_at(host_end);
        let port = match port.strip_prefix(':') {
            Some(port) => port.parse().ok().filter(|port| *port > 0).ok_or(FORM)?,
            None if port.is_empty() => 80,
            None => return Err(FORM),
        };
        let host = match host {
            "localhost" | "127.0.0.1" => SearcherHost::Loopback(host.to_owned()),
            "[::1]" => SearcherHost::Loopback("::1".to_owned()),
            name if is_service_name(name) => SearcherHost::Service(name.to_owned()),
            _ => return Err(FORM),
        };
        let is_allowed = |byte: u8| (b'!'..=b'~').contains(&byte) && byte != b'#';
        if !path.bytes().all(is_allowed) {
            return Err("must have a path of visible ASCII characters without `#`");
        }
        let path = if path.is_empty() { "/" } else { path }.to_owned();
        Ok(Self { host, port, path })
    }
}

/// Returns whether a name is a DNS-1035 label, as names of Services are.
fn is_service_name(name: &str) -> bool {
    let bytes = name.as_bytes();
    bytes.len() <= 63
        && bytes.first().is_some_and(u8::is_ascii_lowercase)
        && bytes.last().is_some_and(|byte| *byte != b'-')
        && bytes.iter().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-')
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(url: &str, expected: Option<(&str, u16, &str)>) {
        let parsed = SearcherUrl::parse(url).ok();
        let host = |host: SearcherHost| match host {
            SearcherHost::Service(name) => name,
            SearcherHost::Loopback(name) => format!("loopback {name}"),
        };
        let parsed = parsed.map(|url| (host(url.host), url.port, url.path));
        let expected = expected.map(|(host, port, path)| (host.to_owned(), port, path.to_owned()));
        assert_eq!(parsed, expected, "{url}");
    }

    #[test]
    fn urls_name_a_service_or_this_machine() {
        check("http://optuna", Some(("optuna", 80, "/")));
        check("http://optuna:8080/ask?x=1", Some(("optuna", 8080, "/ask?x=1")));
        check("http://127.0.0.1:9/a/b", Some(("loopback 127.0.0.1", 9, "/a/b")));
        check("http://[::1]:9", Some(("loopback ::1", 9, "/")));
        check("http://localhost:9/", Some(("loopback localhost", 9, "/")));
        for wrong in [
            "optuna",
            "https://optuna",
            "http://",
            "http://:80",
            "http://optuna.other",
            "http://optuna.other.svc:80/",
            "http://10.0.0.1/",
            "http://169.254.169.254/latest",
            "http://[fe80::1]/",
            "http://user@optuna/",
            "http://optuna:80@evil/",
            "http://optuna:0/",
            "http://optuna:65536/",
            "http://optuna:80x/",
            "http://[::1]x/",
            "http://optuna?x",
            "http://Optuna/",
            "http://-optuna/",
            "http://optuna/a b",
            "http://optuna/a\r\nX: y",
            "http://optuna/#a",
        ] {
            check(wrong, None);
        }
    }

    #[test]
    fn questions_and_answers_have_the_documented_form() {
        let event = SearchEvent::Result(ResultEvent {
            trial: 3,
            tag: Some("a".to_owned()),
            units: 2,
            metric: None,
            values: vec![],
        });
        let event = OrderedEvent { order: 5, event };
        let expected = json!({
            "order": 5, "result": { "trial": 3, "tag": "a", "units": 2, "metric": null },
        });
        assert_eq!(json!(event), expected);
        assert_eq!(serde_json::from_value::<OrderedEvent>(expected).unwrap(), event);
        let answer = json!({
            "call": 1,
            "actions": [
                { "create": { "hyperparameters": { "x": 1 }, "units": 2, "tag": "a" } },
                { "continue": { "trial": 0, "units": 4 } },
                { "pause": { "trial": 1 } }, { "stop": { "trial": 2 } }, { "finish": {} },
            ],
        });
        let parsed: Answer = serde_json::from_value(answer.clone()).unwrap();
        assert_eq!(json!(parsed), answer);
        for wrong in [
            json!({ "call": 1 }),
            json!({ "call": 1, "actions": [], "action": [] }),
            json!({ "call": 1, "actions": [{ "create": { "unit": 2 } }] }),
            json!({ "call": 1, "actions": [{ "finish": { "now": true } }] }),
            json!({ "call": 1, "actions": [{ "kill": { "trial": 2 } }] }),
            json!({ "call": 1, "actions": [{ "stop": { "trial": -1 } }] }),
        ] {
            assert!(serde_json::from_value::<Answer>(wrong.clone()).is_err(), "{wrong}");
        }
    }
}
