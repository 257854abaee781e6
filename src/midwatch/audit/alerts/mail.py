"""Alerts by mail: one connection a message, plain text."""

from __future__ import annotations

import contextlib
import os
import smtplib
import ssl
from email.message import EmailMessage
from email.utils import formatdate, make_msgid

from midwatch.audit.alerts.alert import Message, body, subject
from midwatch.audit.alerts.target import TargetAwayError
from midwatch.config import SmtpConfig, read_secret
from midwatch.core import SYSTEM_CLOCK, ConfigError, printable

_PASSWORD = "alerts.smtp.password"


class Mail:
    """Everybody in ``alerts.to.email``, through one server."""

    is_stateful = False
    name = "email"

    def __init__(self, people: tuple[str, ...], smtp: SmtpConfig) -> None:
        self._people = people
        self._smtp = smtp

    def check(self) -> str:
        for address in (*self._people, self._sender()):
            if address.count("@") != 1 or not address.isprintable() or any(mark in address for mark in " ,;<>"):
                raise ConfigError("CF102", f"alerts.to.email: {address!r} is no address of mail", key="alerts.to.email")
        self._password()
        return f"{self._smtp.host}:{self._smtp.port}, for {', '.join(self._people)}"

    def send(self, message: Message, timeout_s: float) -> str:
        """Blocking: ``timeout_s`` for each answer of the server, of which there are about eight."""
        try:
            refused = self._hand_over(self._letter(message), timeout_s)
        except smtplib.SMTPResponseException as error:
            answer = error.smtp_error
            text = answer.decode("utf-8", "replace") if isinstance(answer, bytes) else str(answer)
            raise TargetAwayError(f"{self._smtp.host} answered {error.smtp_code} {printable(text)[:200]}") from None
        except smtplib.SMTPRecipientsRefused as error:
            raise TargetAwayError(f"{self._smtp.host} takes no mail for {', '.join(error.recipients)}") from None
        except (smtplib.SMTPException, OSError) as error:
            raise TargetAwayError(f"{self._smtp.host}: {printable(error) or type(error).__name__}") from None
        return f"taken, but not for {', '.join(refused)}" if refused else "taken"

    def _hand_over(self, letter: EmailMessage, timeout_s: float) -> list[str]:
        """Whom the server took it not for."""
        smtp, host = self._smtp, os.uname().nodename
        # The own name is given: to look it up may take longer than everything else.
        context = ssl.create_default_context()
        if smtp.security == "tls":
            server: smtplib.SMTP = smtplib.SMTP_SSL(
                smtp.host, smtp.port, local_hostname=host, timeout=timeout_s, context=context
            )
        else:
            server = smtplib.SMTP(smtp.host, smtp.port, local_hostname=host, timeout=timeout_s)
        try:
            if smtp.security == "starttls":
                server.starttls(context=context)
            if smtp.user:
                server.login(smtp.user, self._password())
            refused = server.send_message(letter, self._sender(), list(self._people))
            with contextlib.suppress(smtplib.SMTPException, OSError):
                server.quit()  # it has been taken; how we part is of no consequence
            return sorted(refused)
        finally:
            server.close()

    def _letter(self, message: Message) -> EmailMessage:
        letter = EmailMessage()
        letter["Subject"] = subject(message)
        letter["From"] = self._sender()
        letter["To"] = ", ".join(self._people)
        letter["Date"] = formatdate(SYSTEM_CLOCK.wall_ns() / 1e9)
        letter["Message-ID"] = make_msgid(domain=self._sender().partition("@")[2] or "midwatch")
        letter["Auto-Submitted"] = "auto-generated"  # nobody's holiday reply is wanted
        letter.set_content(f"{body(message)}\n")
        return letter

    def _sender(self) -> str:
        return self._smtp.sender or (self._smtp.user if "@" in self._smtp.user else f"midwatch@{os.uname().nodename}")

    def _password(self) -> str:
        return read_secret(_PASSWORD, self._smtp.password) if self._smtp.password else ""
