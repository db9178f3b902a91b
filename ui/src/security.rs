//! Access to the page: token, host names and headers.
//!
//! On a laptop the page listens on the loopback interface only. Other users of the machine, and
//! pages of other sites in the same browser, can reach it there: so each request needs a token,
//! and must name a loopback host.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

/// Credentials and host names of the page.
#[derive(Clone, Debug)]
pub struct Access {
    /// Token that the first request contains as `?token=`, and later ones as a cookie.
    pub token: String,
    /// Host names with port that requests may name, such as `127.0.0.1:8265`.
    pub hosts: Vec<String>,
    /// Name of the cookie. Browsers share cookies among the ports of a host.
    pub cookie: String,
}

/// Content policy of all pages: scripts, styles and data come from this server only.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
     img-src 'self' data: blob:; connect-src 'self'; form-action 'self'; base-uri 'none'; \
     frame-ancestors 'none'";

/// Checks a request, and adds headers to its response.
pub(crate) async fn guard(State(access): State<Access>, request: Request, next: Next) -> Response {
    let mut response = match check(&access, request.uri(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(response) => *response,
    };
    let headers = response.headers_mut();
    let fixed = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_FRAME_OPTIONS, "DENY"),
    ];
    for (name, value) in fixed {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

fn check(access: &Access, uri: &Uri, headers: &HeaderMap) -> Result<(), Box<Response>> {
    let refuse = |text: &'static str| Box::new((StatusCode::FORBIDDEN, text).into_response());
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    // A page of another site may resolve its own name to this machine.
    if !access.hosts.iter().any(|of| of == host) {
        return Err(refuse("the host name in the URL is not one of this page\n"));
    }
    if let Some(given) = query_token(uri) {
        if !is_equal(given, &access.token) {
            return Err(refuse("the token in the URL is not valid; use the URL of `stoker ui`\n"));
        }
        return Err(Box::new(with_cookie(access, uri)));
    }
    if cookie(headers, &access.cookie).is_some_and(|given| is_equal(given, &access.token)) {
        return Ok(());
    }
    Err(refuse("open the URL that `stoker ui` printed: it contains a token\n"))
}

/// Returns a redirect to the URL without its token, with the cookie.
fn with_cookie(access: &Access, uri: &Uri) -> Response {
    let rest = uri.query().unwrap_or_default().split('&');
    let rest: Vec<&str> = rest.filter(|part| !part.starts_with("token=")).collect();
    let target = match rest.as_slice() {
        [] | [""] => uri.path().to_owned(),
        rest => format!("{}?{}", uri.path(), rest.join("&")),
    };
    // A path such as `//host` would lead to another site.
    let target = format!("/{}", target.trim_start_matches('/'));
    let cookie = format!("{}={}; Path=/; HttpOnly; SameSite=Strict", access.cookie, access.token);
    let headers = [(header::LOCATION, target), (header::SET_COOKIE, cookie)];
    (StatusCode::SEE_OTHER, headers).into_response()
}

fn query_token(uri: &Uri) -> Option<&str> {
    uri.query()?.split('&').find_map(|part| part.strip_prefix("token="))
}

fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    cookies
        .flat_map(|value| value.split(';'))
        .find_map(|cookie| cookie.trim().strip_prefix(name)?.strip_prefix('='))
}

/// Compares two secrets in a time that does not depend on where they differ.
pub(crate) fn is_equal(one: &str, other: &str) -> bool {
    let (one, other) = (one.as_bytes(), other.as_bytes());
    one.len() == other.len()
        && one.iter().zip(other).fold(0, |differ, (one, other)| differ | (one ^ other)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access() -> Access {
        Access {
            token: "secret".to_owned(),
            hosts: vec!["127.0.0.1:8265".to_owned(), "localhost:8265".to_owned()],
            cookie: "stoker-8265".to_owned(),
        }
    }

    fn checked(uri: &str, host: &str, cookie: &str) -> Result<(), (StatusCode, String)> {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, host.parse().unwrap());
        headers.insert(header::COOKIE, cookie.parse().unwrap());
        check(&access(), &uri.parse().unwrap(), &headers).map_err(|response| {
            let location = response.headers().get(header::LOCATION);
            let location = location.map(|value| value.to_str().unwrap().to_owned());
            (response.status(), location.unwrap_or_default())
        })
    }

    #[test]
    fn requests_need_the_token_and_a_loopback_host() {
        let host = "127.0.0.1:8265";
        let refused = Err((StatusCode::FORBIDDEN, String::new()));
        assert_eq!(checked("/", host, "stoker-8265=secret"), Ok(()));
        assert_eq!(checked("/", host, "a=b; stoker-8265=secret"), Ok(()));
        assert_eq!(checked("/", host, ""), refused);
        assert_eq!(checked("/", host, "stoker-8265=secre"), refused);
        assert_eq!(checked("/", host, "stoker-1=secret"), refused);
        assert_eq!(checked("/", "evil.example", "stoker-8265=secret"), refused);
        assert_eq!(checked("/?token=wrong", host, "stoker-8265=secret"), refused);
    }

    #[test]
    fn token_moves_from_the_url_into_a_cookie() {
        let redirect = |to: &str| Err((StatusCode::SEE_OTHER, to.to_owned()));
        let host = "localhost:8265";
        assert_eq!(checked("/?token=secret", host, ""), redirect("/"));
        assert_eq!(checked("/a?x=1&token=secret&y=2", host, ""), redirect("/a?x=1&y=2"));
        assert_eq!(checked("//evil.example?token=secret", host, ""), redirect("/evil.example"));
    }
}
