//! Credentials that a caller passes, instead of those of the process's environment.

use std::collections::BTreeMap;
use std::fmt;
use std::net::Ipv6Addr;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use url::{Host, Url};

use crate::StorageError;

/// Names that are used for `s3://`. Others select a file, a metadata service or a role.
const S3: &[&str] = &[
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
    "AWS_REQUEST_PAYER",
    "AWS_SKIP_SIGNATURE",
];
/// Names that are used for `gs://`.
const GOOGLE: &[&str] = &[
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_BEARER_TOKEN",
    "GOOGLE_BASE_URL",
    "GOOGLE_SKIP_SIGNATURE",
];
/// Names that are used for `az://`.
const AZURE: &[&str] = &[
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_TOKEN",
    "AZURE_STORAGE_CLIENT_ID",
    "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_STORAGE_TENANT_ID",
    "AZURE_CLIENT_ID",
    "AZURE_CLIENT_SECRET",
    "AZURE_TENANT_ID",
    "AZURE_ENDPOINT",
    "AZURE_STORAGE_ENDPOINT",
    "AZURE_SKIP_SIGNATURE",
];

/// Address of the metadata service of AWS.
const METADATA_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);

/// Credentials by the names of environment variables, such as the keys of a Kubernetes Secret.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Credentials(BTreeMap<String, String>);

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl FromIterator<(String, String)> for Credentials {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(values: I) -> Self {
        Self(values.into_iter().filter(|(_, value)| !value.is_empty()).collect())
    }
}

impl Credentials {
    fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Returns whether requests are not signed, as for public buckets.
    fn is_unsigned(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|value| matches!(value.as_str(), "1" | "true" | "TRUE"))
    }

    fn of<K: std::str::FromStr>(&self, names: &[&str]) -> Vec<(K, &str)> {
        let known = self.0.iter().filter(|(name, _)| names.contains(&name.as_str()));
        known
            .filter_map(|(name, value)| {
                Some((name.to_ascii_lowercase().parse().ok()?, value.as_str()))
            })
            .collect()
    }

    /// Fails without complete credentials: a builder would use the machine's own otherwise.
    fn check(&self, url: &str, is_complete: bool, needed: &str) -> Result<(), StorageError> {
        if is_complete {
            return Ok(());
        }
        let names: Vec<&str> = self.0.keys().map(String::as_str).collect();
        let given = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
        Err(StorageError::Credentials {
            url: url.to_owned(),
            reason: format!("needs {needed}; the given credentials contain {given}"),
        })
    }

    pub(crate) fn s3(&self, url: &str) -> Result<AmazonS3Builder, StorageError> {
        let has_keys = self.has("AWS_ACCESS_KEY_ID") && self.has("AWS_SECRET_ACCESS_KEY");
        let is_complete = has_keys || self.is_unsigned("AWS_SKIP_SIGNATURE");
        self.check(url, is_complete, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")?;
        let values = self.of::<AmazonS3ConfigKey>(S3).into_iter();
        Ok(values.fold(AmazonS3Builder::new(), |all, (key, value)| all.with_config(key, value)))
    }

    pub(crate) fn google(&self, url: &str) -> Result<GoogleCloudStorageBuilder, StorageError> {
        let is_complete = self.has("GOOGLE_SERVICE_ACCOUNT_KEY")
            || self.has("GOOGLE_BEARER_TOKEN")
            || self.is_unsigned("GOOGLE_SKIP_SIGNATURE");
        self.check(url, is_complete, "GOOGLE_SERVICE_ACCOUNT_KEY")?;
        let values = self.of::<GoogleConfigKey>(GOOGLE).into_iter();
        let builder = GoogleCloudStorageBuilder::new();
        Ok(values.fold(builder, |all, (key, value)| all.with_config(key, value)))
    }

    pub(crate) fn azure(&self, url: &str) -> Result<MicrosoftAzureBuilder, StorageError> {
        let any = |names: &[&str]| names.iter().any(|name| self.has(name));
        let has_client = any(&["AZURE_CLIENT_ID", "AZURE_STORAGE_CLIENT_ID"])
            && any(&["AZURE_CLIENT_SECRET", "AZURE_STORAGE_CLIENT_SECRET"])
            && any(&["AZURE_TENANT_ID", "AZURE_STORAGE_TENANT_ID"]);
        let is_complete = has_client
            || any(&["AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY"])
            || any(&["AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_TOKEN"])
            || self.is_unsigned("AZURE_SKIP_SIGNATURE");
        self.check(url, is_complete, "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY")?;
        let values = self.of::<AzureConfigKey>(AZURE).into_iter();
        let builder = MicrosoftAzureBuilder::new();
        Ok(values.fold(builder, |all, (key, value)| all.with_config(key, value)))
    }
}

/// Refuses link-local addresses: there, machines of clouds serve their own credentials.
pub(crate) fn check_endpoint(url: &str, endpoint: &str) -> Result<(), StorageError> {
    let is_metadata = match Url::parse(endpoint).ok().as_ref().and_then(Url::host) {
        Some(Host::Ipv4(address)) => address.is_link_local(),
        Some(Host::Ipv6(address)) => match address.to_ipv4_mapped() {
            Some(address) => address.is_link_local(),
            None => address == METADATA_V6 || address.is_unicast_link_local(),
        },
        Some(Host::Domain(name)) => {
            name.trim_end_matches('.').eq_ignore_ascii_case("metadata.google.internal")
        }
        None => false,
    };
    match is_metadata {
        true => Err(StorageError::BadUrl {
            url: url.to_owned(),
            reason: format!("endpoint {endpoint:?} is a link-local address; use another one"),
        }),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Storage;

    fn credentials(values: &[(&str, &str)]) -> Credentials {
        values.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    const S3_KEYS: &[(&str, &str)] =
        &[("AWS_ACCESS_KEY_ID", "id"), ("AWS_SECRET_ACCESS_KEY", "hidden")];

    fn opened(url: &str, endpoint: Option<&str>, values: &[(&str, &str)]) -> Result<(), String> {
        let opened = Storage::open_with(url, endpoint, &credentials(values));
        opened.map(drop).map_err(|error| error.to_string())
    }

    #[test]
    fn complete_credentials_open_a_bucket() {
        assert_eq!(opened("s3://bucket/root", Some("http://s3:8333"), S3_KEYS), Ok(()));
        let azure =
            [("AZURE_STORAGE_ACCOUNT_NAME", "name"), ("AZURE_STORAGE_ACCOUNT_KEY", "aGVsbG8=")];
        assert_eq!(opened("az://container", None, &azure), Ok(()));
        assert_eq!(opened("gs://bucket", None, &[("GOOGLE_BEARER_TOKEN", "token")]), Ok(()));
        assert_eq!(opened("s3://public", None, &[("AWS_SKIP_SIGNATURE", "true")]), Ok(()));
    }

    #[test]
    fn credentials_of_the_machine_are_not_used() {
        let check = |url: &str, values: &[(&str, &str)], part: &str| {
            let error = opened(url, None, values).unwrap_err();
            assert!(error.contains(part), "{error}");
        };
        check("s3://bucket", &[], "AWS_ACCESS_KEY_ID");
        check("s3://bucket", &S3_KEYS[..1], "AWS_SECRET_ACCESS_KEY");
        check("s3://bucket", &[("AWS_WEB_IDENTITY_TOKEN_FILE", "/etc/passwd")], "needs");
        check("gs://bucket", &[("GOOGLE_SERVICE_ACCOUNT", "/etc/passwd")], "needs");
        check("az://container", &[("AZURE_FEDERATED_TOKEN_FILE", "/etc/passwd")], "needs");
        check("file:///etc", S3_KEYS, "directory");
        check("/etc", S3_KEYS, "directory");
    }

    #[test]
    fn endpoints_of_metadata_services_are_refused() {
        let check = |endpoint: &str, is_allowed: bool| {
            let result = opened("s3://latest", Some(endpoint), S3_KEYS);
            assert_eq!(result.is_ok(), is_allowed, "{endpoint}: {result:?}");
            let mut values = S3_KEYS.to_vec();
            values.push(("AWS_ENDPOINT_URL_S3", endpoint));
            assert_eq!(opened("s3://latest", None, &values).is_ok(), is_allowed, "{endpoint}");
        };
        check("http://169.254.169.254", false);
        check("http://[::ffff:169.254.169.254]:80", false);
        check("http://[fe80::1]", false);
        check("http://[fd00:ec2::254]", false);
        check("http://metadata.google.internal.", false);
        check("http://10.0.0.1:8333", true);
        check("https://s3.example.com", true);
    }

    #[test]
    fn values_are_not_printed() {
        let text = format!("{:?}", credentials(S3_KEYS));
        assert!(text.contains("AWS_SECRET_ACCESS_KEY") && !text.contains("hidden"), "{text}");
    }
}
