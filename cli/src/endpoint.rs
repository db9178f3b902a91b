//! Endpoint of S3 storages whose file does not contain one: the recorded one, or
//! `STOKER_STORAGE_ENDPOINT`.

use stoker_api::inference::InferenceJobSpec;

use crate::cluster::storage::ENV_ENDPOINT;
use crate::failure::Failure;

/// Returns the value of `STOKER_STORAGE_ENDPOINT`, unless it is empty.
pub(crate) fn of_environment() -> Option<String> {
    std::env::var(ENV_ENDPOINT).ok().filter(|endpoint| !endpoint.is_empty())
}

/// Sets the endpoint of a storage at `url`, if it is an S3 storage without one. Returns whether it
/// did.
///
/// # Errors
///
/// [`Failure::Input`] if the variable, whose value is `environment`, is used and is not a URL.
pub(crate) fn fill(
    endpoint: &mut Option<String>,
    url: &str,
    environment: Option<&str>,
) -> Result<bool, Failure> {
    let Some(value) = environment.filter(|_| endpoint.is_none() && url.starts_with("s3:")) else {
        return Ok(false);
    };
    if !value.starts_with("http://") && !value.starts_with("https://") {
        return Err(Failure::Input(format!(
            "{ENV_ENDPOINT} is `{value}`: not the address of an S3 server; write a URL such as \
             http://127.0.0.1:8333, or unset it for Amazon S3"
        )));
    }
    *endpoint = Some(value.to_owned());
    Ok(true)
}

/// Same as [`fill`], for all storages of a job whose root is `root`. Returns the URLs of those.
pub(crate) fn fill_job(
    spec: &mut InferenceJobSpec,
    root: &str,
    environment: Option<&str>,
) -> Result<Vec<String>, Failure> {
    let output = spec.output.url.clone().unwrap_or_default();
    let mut storages = vec![
        (&mut spec.storage.endpoint, root.to_owned()),
        (&mut spec.input.endpoint, spec.input.url.clone()),
        (&mut spec.output.endpoint, output),
    ];
    let stored = spec.checkpoint.as_mut().and_then(|checkpoint| checkpoint.stored.as_mut());
    storages.extend(stored.map(|trial| (&mut trial.endpoint, trial.url.clone())));
    let mut filled = vec![];
    for (endpoint, url) in storages {
        if fill(endpoint, &url, environment)? {
            filled.push(url);
        }
    }
    Ok(filled)
}

/// Returns a note that the variable determines the server of these URLs, if there are any.
pub(crate) fn note_of_use(urls: &[String], environment: Option<&str>) -> Option<String> {
    let value = environment.filter(|_| !urls.is_empty())?;
    Some(format!("note: {ENV_ENDPOINT} is set, so these are on {value}: {}", urls.join(", ")))
}

/// Returns a note that a resumed run or job ignores the variable, if its S3 storage at `url` has
/// another endpoint.
pub(crate) fn note_of_resume(
    what: &str,
    url: &str,
    endpoint: Option<&str>,
    environment: Option<&str>,
) -> Option<String> {
    environment.filter(|value| url.starts_with("s3:") && endpoint != Some(*value))?;
    let recorded = endpoint.unwrap_or("no endpoint");
    Some(format!(
        "note: {ENV_ENDPOINT} is ignored, because this {what} began with {recorded} for {url}; \
         use --fresh to start over"
    ))
}

/// Returns the spec of a job with the recorded endpoints where it has none.
pub(crate) fn with_recorded(
    mut spec: InferenceJobSpec,
    recorded: &InferenceJobSpec,
) -> InferenceJobSpec {
    let stored = |spec: &InferenceJobSpec| {
        spec.checkpoint.as_ref()?.stored.as_ref().and_then(|trial| trial.endpoint.clone())
    };
    let mut endpoints = vec![
        (&mut spec.storage.endpoint, recorded.storage.endpoint.clone()),
        (&mut spec.input.endpoint, recorded.input.endpoint.clone()),
        (&mut spec.output.endpoint, recorded.output.endpoint.clone()),
    ];
    let of_stored = spec.checkpoint.as_mut().and_then(|checkpoint| checkpoint.stored.as_mut());
    endpoints.extend(of_stored.map(|trial| (&mut trial.endpoint, stored(recorded))));
    for (endpoint, recorded) in endpoints {
        *endpoint = endpoint.take().or(recorded);
    }
    spec
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn file_precedes_environment_and_other_roots_ignore_it() {
        let filled = |given: Option<&str>, url: &str, environment: Option<&str>| {
            let mut endpoint = given.map(str::to_owned);
            fill(&mut endpoint, url, environment).map(|_| endpoint).map_err(|e| e.to_string())
        };
        let (file, here) = (Some("http://file"), Some("http://here"));
        let owned = |text: Option<&str>| Ok(text.map(str::to_owned));
        assert_eq!(filled(None, "s3://a/b", here), owned(here));
        assert_eq!(filled(file, "s3://a/b", here), owned(file));
        assert_eq!(filled(None, "s3://a/b", None), owned(None));
        for url in ["/data", "gs://a/b", "az://a/b", "rows.csv"] {
            assert_eq!(filled(None, url, here), owned(None), "{url}");
        }
        let error = filled(None, "s3://a/b", Some("here:8333")).unwrap_err();
        assert!(error.starts_with("STOKER_STORAGE_ENDPOINT is `here:8333`: not"), "{error}");
        assert_eq!(filled(None, "/data", Some("here:8333")), owned(None));
    }

    #[test]
    fn jobs_use_it_for_each_address() {
        let mut spec: InferenceJobSpec = serde_json::from_value(json!({
            "entrypoint": {"command": ["x"]}, "input": {"url": "s3://data/*.csv"},
            "output": {"url": "s3://out", "endpoint": "http://file"},
            "checkpoint": {"stored": {"url": "s3://models", "trialPath": "a/trials/0"}},
        }))
        .unwrap();
        let file = spec.clone();
        let urls = fill_job(&mut spec, "s3://root", Some("http://here")).unwrap();
        assert_eq!(urls, ["s3://root", "s3://data/*.csv", "s3://models"]);
        let stored = spec.checkpoint.as_ref().unwrap().stored.as_ref().unwrap();
        assert_eq!(stored.endpoint.as_deref(), Some("http://here"));
        assert_eq!(with_recorded(file, &spec), spec);
        let endpoints = [&spec.storage.endpoint, &spec.input.endpoint, &spec.output.endpoint];
        let endpoints = endpoints.map(|endpoint| endpoint.as_deref().unwrap());
        assert_eq!(endpoints, ["http://here", "http://here", "http://file"]);
        spec.output = serde_json::from_value(json!({})).unwrap();
        fill_job(&mut spec, "s3://root", Some("http://here")).unwrap();
        assert_eq!(spec.output.endpoint, None);
    }

    #[test]
    fn use_and_neglect_are_noted() {
        let here = Some("http://here");
        let urls = ["s3://a".to_owned(), "s3://b".to_owned()];
        let note = note_of_use(&urls, here).unwrap();
        let expected =
            "note: STOKER_STORAGE_ENDPOINT is set, so these are on http://here: s3://a, s3://b";
        assert_eq!(note, expected);
        assert_eq!(note_of_use(&[], here), None);
        let note = note_of_resume("run", "s3://a", None, here).unwrap();
        assert!(note.contains("this run began with no endpoint for s3://a; use --fresh"), "{note}");
        assert_eq!(note_of_resume("run", "s3://a", here, here), None);
        assert_eq!(note_of_resume("run", "/data", None, here), None);
        assert_eq!(note_of_resume("run", "s3://a", None, None), None);
    }
}
