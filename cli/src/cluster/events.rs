//! Kubernetes events of an object.

use k8s_openapi::api::core::v1::Event;
use kube::api::ListParams;
use stoker_api::time::Timestamp;

use super::connect::Cluster;
use super::text;

/// Maximum number of events shown. Older events are omitted.
const SHOWN_MAX: usize = 20;

/// Formats the events of one object and of the pods with the name prefix `pods`, oldest first. If
/// the events cannot be read, returns the error text instead.
pub(crate) async fn section(
    cluster: &Cluster,
    kind: &str,
    name: &str,
    pods: Option<&str>,
) -> String {
    let of = |selector: String| async move {
        let params = ListParams::default().fields(&selector);
        cluster.list::<Event>("events", &params, false).await
    };
    let mut selectors = vec![format!("involvedObject.kind={kind},involvedObject.name={name}")];
    selectors.extend(pods.map(|_| "involvedObject.kind=Pod".to_owned()));
    let mut events: Vec<Event> = Vec::new();
    for selector in selectors {
        match of(selector).await {
            Ok(listed) => events.extend(listed.into_iter().map(|(event, _)| event)),
            Err(error) => return format!("\n\nEvents: {error}"),
        }
    }
    events.retain(|event| {
        let object = &event.involved_object;
        let is_match = |name: &String| pods.is_some_and(|prefix| name.starts_with(prefix));
        object.kind.as_deref() != Some("Pod") || object.name.as_ref().is_some_and(is_match)
    });
    render(events, text::now())
}

fn render(mut events: Vec<Event>, now: Timestamp) -> String {
    events.sort_by_key(last_seen);
    let num_omitted = events.len().saturating_sub(SHOWN_MAX);
    let rows: Vec<Vec<String>> =
        events.iter().skip(num_omitted).map(|event| row(event, now)).collect();
    let title = match num_omitted {
        0 => "Events".to_owned(),
        num => format!("Events ({num} earlier omitted)"),
    };
    text::section(&title, &["AGE", "TYPE", "REASON", "OBJECT", "MESSAGE"], &rows)
}

/// Returns the time of the last occurrence. The APIs `v1` and `events.k8s.io/v1` set different
/// fields.
fn last_seen(event: &Event) -> Option<Timestamp> {
    let of_series = event.series.as_ref().and_then(|series| series.last_observed_time.as_ref());
    let seconds = of_series
        .map(|time| time.0.as_second())
        .or_else(|| event.last_timestamp.as_ref().map(|time| time.0.as_second()))
        .or_else(|| event.event_time.as_ref().map(|time| time.0.as_second()))
        .or_else(|| event.first_timestamp.as_ref().map(|time| time.0.as_second()));
    seconds.map(Timestamp).or_else(|| text::created(&event.metadata))
}

fn row(event: &Event, now: Timestamp) -> Vec<String> {
    let of = |text: &Option<String>| text.clone().unwrap_or_default();
    let object = &event.involved_object;
    let count = event.series.as_ref().and_then(|series| series.count).or(event.count).unwrap_or(1);
    let times = if count > 1 { format!(" (x{count})") } else { String::new() };
    vec![
        format!("{}{times}", text::age(last_seen(event), now)),
        of(&event.type_),
        of(&event.reason),
        format!("{}/{}", of(&object.kind).to_lowercase(), of(&object.name)),
        of(&event.message).replace('\n', " "),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn events_of_both_apis_are_sorted_by_time() {
        let events = [
            json!({"metadata": {}, "type": "Warning", "reason": "BackOff", "message": "pull",
                "involvedObject": {"kind": "Pod", "name": "m-0-a0-r0"}, "count": 4,
                "lastTimestamp": "2026-11-21T19:00:50Z"}),
            json!({"metadata": {}, "type": "Normal", "reason": "Started", "message": "attempt 0",
                "involvedObject": {"kind": "Trial", "name": "m-0"},
                "eventTime": "2026-11-21T19:00:00.000001Z"}),
        ];
        let events: Vec<Event> =
            events.into_iter().map(|value| serde_json::from_value(value).unwrap()).collect();
        let text = render(events, "2026-11-21T19:01:00Z".parse().unwrap());
        assert_eq!(
            text,
            "\n\nEvents:\n  AGE       TYPE     REASON   OBJECT         MESSAGE\n  \
             60s       Normal   Started  trial/m-0      attempt 0\n  \
             10s (x4)  Warning  BackOff  pod/m-0-a0-r0  pull"
        );
    }

    #[test]
    fn section_is_empty_without_events() {
        assert_eq!(render(vec![], Timestamp(0)), "");
    }
}
