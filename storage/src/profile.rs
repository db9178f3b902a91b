//! AWS profiles with static keys, from the configuration files of the AWS tools.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Settings of a profile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Profile {
    pub(crate) access_key_id: Option<String>,
    pub(crate) secret_access_key: Option<String>,
    pub(crate) session_token: Option<String>,
    pub(crate) region: Option<String>,
    pub(crate) endpoint_url: Option<String>,
}

/// Source of credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CredentialSource {
    /// Environment variables, or the metadata service of the machine.
    Environment,
    /// A profile, which may specify only a region.
    Profile(Profile),
}

type Section = BTreeMap<String, String>;

/// Finds credentials in the order of the AWS tools: keys, a web identity or a container credential
/// URI in the environment, then a profile. If `AWS_PROFILE` is set, only keys take precedence over
/// the profile.
///
/// # Errors
///
/// Cause and remedy, if the profile is missing or of an unsupported kind.
pub(crate) fn find(
    environment: &dyn Fn(&str) -> Option<String>,
    read: &dyn Fn(&Path) -> Option<String>,
) -> Result<CredentialSource, String> {
    let named = environment("AWS_PROFILE").or_else(|| environment("AWS_DEFAULT_PROFILE"));
    let sources: &[&str] = match named {
        Some(_) => &["AWS_ACCESS_KEY_ID"],
        None => &[
            "AWS_ACCESS_KEY_ID",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        ],
    };
    if sources.iter().any(|name| environment(name).is_some()) {
        return Ok(CredentialSource::Environment);
    }
    let home = environment("HOME").map(PathBuf::from).unwrap_or_default();
    let file = |name: &str, default: &str| {
        environment(name).map_or_else(|| home.join(".aws").join(default), PathBuf::from)
    };
    let credentials = file("AWS_SHARED_CREDENTIALS_FILE", "credentials");
    let config = file("AWS_CONFIG_FILE", "config");
    let name = named.as_deref().unwrap_or("default");
    let sections = |path: &Path| sections(&read(path).unwrap_or_default());
    let mut section = Section::new();
    let mut is_known = false;
    // The credentials file takes precedence.
    for (path, title) in [(&config, title(name)), (&credentials, name.to_owned())] {
        if let Some(settings) = sections(path).remove(&title) {
            is_known = true;
            section.extend(settings);
        }
    }
    match (is_known, &named) {
        (true, _) => profile(name, section),
        (false, None) => Ok(CredentialSource::Environment),
        (false, Some(name)) => Err(format!(
            "profile {name:?} of AWS_PROFILE not found in {} and {}; add it, or unset AWS_PROFILE",
            credentials.display(),
            config.display()
        )),
    }
}

/// Returns the title of a profile's section in the config file.
fn title(name: &str) -> String {
    if name == "default" { name.to_owned() } else { format!("profile {name}") }
}

fn profile(name: &str, mut section: Section) -> Result<CredentialSource, String> {
    let keys = section.contains_key("aws_access_key_id");
    if keys != section.contains_key("aws_secret_access_key") {
        return Err(format!(
            "profile {name:?} has only one of aws_access_key_id and aws_secret_access_key; set both"
        ));
    }
    let unsupported = section.keys().find(|key| {
        key.starts_with("sso_") || matches!(key.as_str(), "credential_process" | "role_arn")
    });
    if let (false, Some(key)) = (keys, unsupported) {
        let kind = if key.starts_with("sso_") { "SSO".to_owned() } else { format!("`{key}`") };
        return Err(format!(
            "profile {name:?} gets its keys by {kind}, which is unsupported; export temporary \
             keys (`aws configure export-credentials --profile {name} --format env` prints them) \
             or set AWS_PROFILE to a profile with static keys"
        ));
    }
    Ok(CredentialSource::Profile(Profile {
        access_key_id: section.remove("aws_access_key_id"),
        secret_access_key: section.remove("aws_secret_access_key"),
        session_token: section.remove("aws_session_token"),
        region: section.remove("region"),
        endpoint_url: section.remove("endpoint_url"),
    }))
}

/// Parses `[title]` and `key = value` lines. Indented lines belong to a nested table and are
/// skipped; `#` and `;` start comments.
fn sections(text: &str) -> BTreeMap<String, Section> {
    let mut sections = BTreeMap::<String, Section>::new();
    let mut title = None;
    for line in text.lines() {
        let is_nested = line.starts_with([' ', '\t']);
        let line = line.trim();
        if line.is_empty() || line.starts_with(['#', ';']) || is_nested {
            continue;
        }
        if let Some((inner, _)) = line.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            let words: Vec<&str> = inner.split_whitespace().collect();
            let words = words.join(" ");
            sections.entry(words.clone()).or_default();
            title = Some(words);
        } else if let (Some(title), Some((key, value))) = (&title, line.split_once('=')) {
            let value = value.split(" #").next().unwrap_or_default().trim();
            let section = sections.entry(title.clone()).or_default();
            section.insert(key.trim().to_lowercase(), value.to_owned());
        }
    }
    sections
}

#[cfg(test)]
mod tests {
    use super::*;

    const CREDENTIALS: &str = "\
# keys
[default]
aws_access_key_id = A
aws_secret_access_key=s=1

[ci]
aws_access_key_id = B
aws_secret_access_key = t
aws_session_token = u
";
    const CONFIG: &str = "\
[default]
region = eu-central-1 # near
s3 =
  region = wrong
[profile ci]
region = us-west-2
endpoint_url = http://127.0.0.1:8333
[profile sso]
sso_start_url = https://example.com
[profile role]
role_arn = arn:aws:iam::1:role/x
[profile half]
aws_access_key_id = C
[sso-session s]
sso_region = x
";

    fn keys(id: &str, secret: &str, region: &str) -> Profile {
        Profile {
            access_key_id: Some(id.to_owned()),
            secret_access_key: Some(secret.to_owned()),
            region: Some(region.to_owned()),
            ..Profile::default()
        }
    }

    fn check(environment: &[(&str, &str)], expected: Result<CredentialSource, &str>) {
        let lookup = |name: &str| {
            let (_, value) = environment.iter().find(|(key, _)| *key == name)?;
            Some((*value).to_owned())
        };
        let read = |path: &Path| match path.to_str() {
            Some("/home/me/.aws/credentials" | "/elsewhere") => Some(CREDENTIALS.to_owned()),
            Some("/home/me/.aws/config") => Some(CONFIG.to_owned()),
            _ => None,
        };
        match (find(&lookup, &read), expected) {
            (Err(text), Err(part)) => assert!(text.contains(part), "{text}"),
            (source, expected) => {
                assert_eq!(source, expected.map_err(str::to_owned), "{environment:?}");
            }
        }
    }

    #[test]
    fn credential_sources_follow_the_aws_order() {
        let home = ("HOME", "/home/me");
        let default = CredentialSource::Profile(keys("A", "s=1", "eu-central-1"));
        check(&[home], Ok(default));
        check(&[home, ("AWS_ACCESS_KEY_ID", "X")], Ok(CredentialSource::Environment));
        check(&[home, ("AWS_WEB_IDENTITY_TOKEN_FILE", "/t")], Ok(CredentialSource::Environment));
        check(&[("HOME", "/home/nobody")], Ok(CredentialSource::Environment));
        let ci = CredentialSource::Profile(Profile {
            session_token: Some("u".to_owned()),
            endpoint_url: Some("http://127.0.0.1:8333".to_owned()),
            ..keys("B", "t", "us-west-2")
        });
        check(&[home, ("AWS_PROFILE", "ci"), ("AWS_WEB_IDENTITY_TOKEN_FILE", "/t")], Ok(ci));
        let elsewhere = CredentialSource::Profile(Profile { region: None, ..keys("A", "s=1", "") });
        check(&[("AWS_SHARED_CREDENTIALS_FILE", "/elsewhere")], Ok(elsewhere));
    }

    #[test]
    fn unusable_profiles_are_refused_with_a_remedy() {
        let of = |name| [("HOME", "/home/me"), ("AWS_PROFILE", name)];
        check(&of("sso"), Err("SSO, which is unsupported; export temporary keys"));
        check(&of("role"), Err("`role_arn`, which is unsupported"));
        check(&of("half"), Err("set both"));
        check(&of("none"), Err("unset AWS_PROFILE"));
    }
}
