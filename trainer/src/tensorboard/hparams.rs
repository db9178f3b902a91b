//! Records of TensorBoard's HParams plugin: hyperparameters and metrics of the experiment, start
//! and end of a session. A session is a trial.
//!
//! The plugin reads the metadata of summaries with fixed tags. Their values are not used.

use std::collections::BTreeMap;

use serde_json::Value;
use stoker_api::contract::TrialConfig;
use stoker_api::hyperparameters::{Parameter, Space};

use super::{Message, record};

/// Type of a hyperparameter, as the plugin encodes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
enum DataType {
    String = 1,
    Bool = 2,
    Float = 3,
}

impl DataType {
    fn of(value: &Value) -> Self {
        match value {
            Value::Bool(_) => Self::Bool,
            Value::Number(_) => Self::Float,
            _ => Self::String,
        }
    }
}

/// Type and domain of a hyperparameter.
#[derive(Clone, Debug, PartialEq)]
struct Info {
    data_type: DataType,
    domain: Domain,
}

#[derive(Clone, Debug, PartialEq)]
enum Domain {
    Any,
    Discrete(Vec<Value>),
    Interval(f64, f64),
}

/// Outcome of a session, as the plugin encodes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum SessionStatus {
    Success = 1,
    Failure = 2,
}

/// Returns the start of a trial's session, with its hyperparameters.
pub(crate) fn session_start(time: f64, config: &TrialConfig) -> Vec<u8> {
    let mut values = BTreeMap::new();
    flatten("", &config.hyperparameters, &mut values);
    let mut start = Message::default();
    for (name, value) in &values {
        let mut entry = Message::default();
        entry.bytes(1, name.as_bytes());
        entry.bytes(2, &encoded(value).0);
        start.bytes(1, &entry.0);
    }
    start.bytes(2, config.storage.trial_path.as_bytes());
    start.double(5, time);
    event(time, "_hparams_/session_start_info", 3, &start)
}

/// Returns the end of a trial's session.
pub(crate) fn session_end(time: f64, status: SessionStatus) -> Vec<u8> {
    let mut end = Message::default();
    end.varint(1, status as u64);
    end.double(2, time);
    event(time, "_hparams_/session_end_info", 4, &end)
}

/// Returns the hyperparameters of the experiment and these validation metrics. `group` is the group
/// of the metrics.
pub(crate) fn experiment<'a>(
    time: f64,
    config: &TrialConfig,
    group: &str,
    metrics: impl Iterator<Item = &'a String>,
) -> Vec<u8> {
    let mut experiment = Message::default();
    experiment.bytes(6, config.experiment.as_bytes());
    for (name, info) in infos(config) {
        experiment.bytes(4, &encoded_info(&name, &info).0);
    }
    let mut names: Vec<&String> = metrics.collect();
    // The searched metric comes first, because the views select the first ones.
    names.sort_by_key(|name| **name != config.metric);
    for metric in names {
        let mut name = Message::default();
        name.bytes(2, format!("{group}/{metric}").as_bytes());
        let mut info = Message::default();
        info.bytes(1, &name.0);
        info.bytes(3, metric.as_bytes());
        info.varint(5, 2);
        experiment.bytes(5, &info.0);
    }
    event(time, "_hparams_/experiment", 2, &experiment)
}

/// Returns the hyperparameters of the search space, or those of the trial without a space.
fn infos(config: &TrialConfig) -> BTreeMap<String, Info> {
    let mut infos = BTreeMap::new();
    if let Ok(space) = Space::parse(&config.search_space) {
        add_space("", &space, &mut infos);
    }
    let mut values = BTreeMap::new();
    flatten("", &config.hyperparameters, &mut values);
    for (name, value) in values {
        let info = Info { data_type: DataType::of(&value), domain: Domain::Any };
        infos.entry(name).or_insert(info);
    }
    infos
}

fn joined(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// Adds names such as `net.width`. Lists are values.
fn flatten(path: &str, value: &Value, values: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(name, value)| flatten(&joined(path, name), value, values));
        }
        _ => drop(values.insert(path.to_owned(), value.clone())),
    }
}

fn add_space(path: &str, space: &Space, infos: &mut BTreeMap<String, Info>) {
    match space {
        Space::Group(members) => {
            for (name, member) in members {
                add_space(&joined(path, name), member, infos);
            }
        }
        Space::OneOf(groups) => groups.iter().for_each(|group| add_space(path, group, infos)),
        Space::Parameter(Parameter::Const(value)) => {
            let mut values = BTreeMap::new();
            flatten(path, value, &mut values);
            for (name, value) in values {
                let domain = Domain::Discrete(vec![value.clone()]);
                add(name, Info { data_type: DataType::of(&value), domain }, infos);
            }
        }
        Space::Parameter(parameter) => add(path.to_owned(), info(parameter), infos),
    }
}

fn info(parameter: &Parameter) -> Info {
    let interval =
        |min, max| Info { data_type: DataType::Float, domain: Domain::Interval(min, max) };
    match parameter {
        Parameter::Int(range) => interval(range.min as f64, range.max as f64),
        Parameter::Double(range) => interval(range.min, range.max),
        Parameter::Log(range) => interval(range.base.powf(range.min), range.base.powf(range.max)),
        Parameter::Const(value) => discrete(std::slice::from_ref(value)),
        Parameter::Categorical(values) => discrete(values),
    }
}

fn discrete(values: &[Value]) -> Info {
    let data_type = values.first().map_or(DataType::String, DataType::of);
    match values.iter().all(|value| DataType::of(value) == data_type) {
        true => Info { data_type, domain: Domain::Discrete(values.to_vec()) },
        false => Info { data_type: DataType::String, domain: Domain::Any },
    }
}

/// Adds a hyperparameter. Several groups of a choice may contain the same name: their values are
/// combined, or have no domain if they are of different kinds.
fn add(name: String, info: Info, infos: &mut BTreeMap<String, Info>) {
    let Some(before) = infos.get_mut(&name) else {
        infos.insert(name, info);
        return;
    };
    before.domain = match (&before.domain, &info.domain) {
        (Domain::Discrete(one), Domain::Discrete(other)) => {
            let new = other.iter().filter(|value| !one.contains(value));
            Domain::Discrete(one.iter().chain(new).cloned().collect())
        }
        (Domain::Interval(min, max), Domain::Interval(other_min, other_max)) => {
            Domain::Interval(min.min(*other_min), max.max(*other_max))
        }
        _ => Domain::Any,
    };
    if before.data_type != info.data_type {
        *before = Info { data_type: DataType::String, domain: Domain::Any };
    }
}

fn encoded_info(name: &str, info: &Info) -> Message {
    let mut message = Message::default();
    message.bytes(1, name.as_bytes());
    message.bytes(2, name.as_bytes());
    message.varint(4, info.data_type as u64);
    match &info.domain {
        Domain::Any => {}
        Domain::Discrete(values) => {
            let mut list = Message::default();
            values.iter().for_each(|value| list.bytes(1, &encoded(value).0));
            message.bytes(5, &list.0);
        }
        Domain::Interval(min, max) => {
            let mut interval = Message::default();
            interval.double(1, *min);
            interval.double(2, *max);
            message.bytes(6, &interval.0);
        }
    }
    message
}

/// Encodes a value as `google.protobuf.Value`. Lists and null are text.
fn encoded(value: &Value) -> Message {
    let mut message = Message::default();
    match value {
        Value::Bool(value) => message.varint(4, u64::from(*value)),
        Value::Number(value) => message.double(2, value.as_f64().unwrap_or(f64::NAN)),
        Value::String(text) => message.bytes(3, text.as_bytes()),
        other => message.bytes(3, other.to_string().as_bytes()),
    }
    message
}

/// Returns an event with a summary for the plugin. `field` is that of `content` in the plugin's
/// data.
fn event(time: f64, tag: &str, field: u64, content: &Message) -> Vec<u8> {
    let mut data = Message::default();
    data.bytes(field, &content.0);
    let mut plugin = Message::default();
    plugin.bytes(1, b"hparams");
    plugin.bytes(2, &data.0);
    let mut metadata = Message::default();
    metadata.bytes(1, &plugin.0);
    // A tensor of one zero: readers drop summaries without a value.
    let (mut dimension, mut shape, mut tensor) =
        (Message::default(), Message::default(), Message::default());
    dimension.varint(1, 1);
    shape.bytes(2, &dimension.0);
    tensor.varint(1, 1);
    tensor.bytes(2, &shape.0);
    tensor.bytes(5, &0.0_f32.to_le_bytes());
    let mut value = Message::default();
    value.bytes(1, tag.as_bytes());
    value.bytes(9, &metadata.0);
    value.bytes(8, &tensor.0);
    let mut summary = Message::default();
    summary.bytes(1, &value.0);
    let mut event = Message::default();
    event.double(1, time);
    event.bytes(5, &summary.0);
    record(&event.0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn infos_of(space: &Value) -> BTreeMap<String, Info> {
        let mut infos = BTreeMap::new();
        add_space("", &Space::parse(space).unwrap(), &mut infos);
        infos
    }

    #[track_caller]
    fn check(space: &Value, expected: &[(&str, DataType, Domain)]) {
        let found = infos_of(space);
        let found: Vec<_> = found
            .iter()
            .map(|(name, info)| (name.as_str(), info.data_type, info.domain.clone()))
            .collect();
        assert_eq!(found, expected, "{space}");
    }

    #[test]
    fn spaces_become_types_and_domains() {
        let interval = Domain::Interval;
        check(
            &json!({ "a": { "int": { "min": 1, "max": 4 } } }),
            &[("a", DataType::Float, interval(1.0, 4.0))],
        );
        check(
            &json!({ "a": { "log": { "min": -2, "max": 1 } } }),
            &[("a", DataType::Float, interval(0.01, 10.0))],
        );
        let values = vec![json!("x"), json!("y")];
        check(
            &json!({ "n": { "a": { "categorical": values } } }),
            &[("n.a", DataType::String, Domain::Discrete(values.clone()))],
        );
        check(
            &json!({ "a": { "categorical": [1, "x"] } }),
            &[("a", DataType::String, Domain::Any)],
        );
        check(&json!({ "a": true }), &[("a", DataType::Bool, Domain::Discrete(vec![json!(true)]))]);
    }

    #[test]
    fn choices_combine_the_domains_of_their_groups() {
        let space = json!({ "net": { "oneOf": [
            { "kind": "small", "width": { "int": { "min": 1, "max": 4 } } },
            { "kind": "large", "width": { "int": { "min": 8, "max": 64 } }, "depth": 3 },
        ] } });
        check(
            &space,
            &[
                ("net.depth", DataType::Float, Domain::Discrete(vec![json!(3)])),
                (
                    "net.kind",
                    DataType::String,
                    Domain::Discrete(vec![json!("small"), json!("large")]),
                ),
                ("net.width", DataType::Float, Domain::Interval(1.0, 64.0)),
            ],
        );
    }
}
