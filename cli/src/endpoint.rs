//! Endpoint of S3 storages whose file does not contain one: the recorded one, or
//! `STOKER_STORAGE_ENDPOINT`.

use stoker_api::inference::InferenceJobSpec;

use crate::cluster::storage::ENV_ENDPOINT;
use crate::failure::Failure;

/// Returns the value of `STOKER_STORAGE_ENDPOINT`, unless it is empty.
pub(crate) fn of_environment() -> Option<String> {
    std::env::var(ENV_ENDPOINT).ok().filter(|endpoint| !endpoint.is_empty())
}

/// Sets the endpoint of a storage at `url`, if it is an S3 storage without one.
///
/// # Errors
///
/// [`Failure::Input`] if the variable, whose value is `environment`, is used and is not a URL.
pub(crate) fn fill(
    endpoint: &mut Option<String>,
    url: &str,
    environment: Option<&str>,
) -> Result<(), Failure> {
    let Some(value) = environment.filter(|_| endpoint.is_none() && url.starts_with("s3:")) else {
        return Ok(());
    };
    if !value.starts_with("http://") && !value.starts_with("https://") {
        return Err(Failure::Input(format!(
            "{ENV_ENDPOINT} is `{value}`: not the address of an S3 server; write a URL such as \
             http://127.0.0.1:8333, or unset it for Amazon S3"
        )));
    }
    *endpoint = Some(value.to_owned());
    Ok(())
}

/// Same as [`fill`], for all storages of a job whose root is `root`.
pub(crate) fn fill_job(
    spec: &mut InferenceJobSpec,
    root: &str,
    environment: Option<&str>,
) -> Result<(), Failure> {
    fill(&mut spec.storage.endpoint, root, environment)?;
    fill(&mut spec.input.endpoint, &spec.input.url, environment)?;
    let output = spec.output.url.as_deref().unwrap_or_default();
    fill(&mut spec.output.endpoint, output, environment)
}

/// Returns the spec of a job with the recorded endpoints where it has none.
pub(crate) fn with_recorded(
    mut spec: InferenceJobSpec,
    recorded: &InferenceJobSpec,
) -> InferenceJobSpec {
    for (endpoint, recorded) in [
        (&mut spec.storage.endpoint, &recorded.storage.endpoint),
        (&mut spec.input.endpoint, &recorded.input.endpoint),
        (&mut spec.output.endpoint, &recorded.output.endpoint),
    ] {
        *endpoint = endpoint.take().or_else(|| recorded.clone());
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
            fill(&mut endpoint, url, environment).map(|()| endpoint).map_err(|e| e.to_string())
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
        }))
        .unwrap();
        fill_job(&mut spec, "s3://root", Some("http://here")).unwrap();
        let endpoints = [&spec.storage.endpoint, &spec.input.endpoint, &spec.output.endpoint];
        let endpoints = endpoints.map(|endpoint| endpoint.as_deref().unwrap());
        assert_eq!(endpoints, ["http://here", "http://here", "http://file"]);
        spec.output = serde_json::from_value(json!({})).unwrap();
        fill_job(&mut spec, "s3://root", Some("http://here")).unwrap();
        assert_eq!(spec.output.endpoint, None);
    }
}
